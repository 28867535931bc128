"""What a run saves beside its trainer's checkpoints, and what a resumed run starts from.

The trainer saves itself within its step. Here is the rest: the state of the guard, the live
calibration and the artifact that serves (forge_ptq/guard_state.py). Files are written in a thread
while the loop goes on. A save that fails is an event of the run, not its end: what was saved before
stays, and the next interval tries again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from forge_ptq import guard_state
from forge_ptq.config import RunConfig
from forge_ptq.guard_state import GuardState, Snapshot
from forge_ptq.observe.report import RunReport
from forge_ptq.training import checkpoints

from .pacing import oldest_usable

if TYPE_CHECKING:
    from .components import Components

log = logging.getLogger(__name__)

EVENT = "checkpoint"
CLOSE_TIMEOUT_S = 20.0
"""For the save that is under way when the run ends."""


async def restore(cfg: RunConfig, report: RunReport) -> GuardState | None:
    """Puts what an earlier session saved into the fresh store, before anything is spawned: the
    generators then start from the artifact that served, the quantizers from the live calibration.

    An artifact that would be too old to train on, or that has failed its probation, stays out; the
    rest counts all the same. None, and an event, if nothing that was saved can be read: the run
    calibrates anew.
    """
    if not (cfg.ptq.enabled and cfg.trainer.checkpoint.enable):
        return None
    folder = report.run_dir.checkpoint(cfg.trainer.checkpoint.folder)
    step = max(checkpoints.complete_steps(folder), default=0)

    def find() -> GuardState | None:
        guard_state.forget_after(folder, step)
        return guard_state.newest(folder, step, lambda text: report.add_event(EVENT, text))

    state = await asyncio.to_thread(find)
    if state is None:
        return None
    steps, every = cfg.trainer.training.steps, cfg.ptq.publish_every
    served = await guard_state.restore(state, oldest_usable(step, steps, every, cfg.off_by_n))
    live = state.calibration
    calibrated = f"calibration {live.round} if it fits the plan" if live else "no calibration"
    serving = f"version {served.policy_version} serves again" if served else "nothing serves yet"
    report.note(f"the guard goes on from step {state.step}: {calibrated}, {serving}")
    return state


class Saving:
    """Watches over the checkpoints of one run. The training loop calls

    await saving.trained(step)   after each step: was the checkpoint saved that was due?
    await saving.guard(step)     between two publishes: saves the guard state if it is due
    await saving.condemned()     what has served failed its probation: saves it at once
    await saving.close()         at the end
    """

    def __init__(self, cfg: RunConfig, forge: Components, report: RunReport) -> None:
        self._cfg, self._forge, self._report = cfg.trainer, forge, report
        self._folder = report.run_dir.checkpoint(cfg.trainer.checkpoint.folder)
        self._step = self._saved = 0
        self._pending: Snapshot | None = None
        self._writing: asyncio.Task[None] | None = None

    def resumed(self, step: int) -> None:
        """The run goes on after `step`, which is saved."""
        self._step = self._saved = step

    def _due(self, step: int) -> bool:
        checkpoint = self._cfg.checkpoint
        last = step == self._cfg.training.steps
        return checkpoint.enable and (last or step % checkpoint.interval == 0)

    async def trained(self, step: int) -> None:
        """Tells of a checkpoint that the trainer could not save, and of what failed beside one."""
        self._step = step
        if not self._due(step):
            return
        errors = list((await self._forge.trainer.save_errors.call()).values())
        error = next((error for error, _ in errors if error), "")
        undone = next((undone for _, undone in errors if undone), "")
        if error:
            self._event(f"the checkpoint of step {step} is not saved: {error}")
        else:
            self._saved = step
        if undone:
            self._event(f"left undone after step {step}: {undone}")

    async def guard(self, step: int) -> None:
        """Saves the guard state beside the checkpoint of `step`, if there is one.

        Returns once its contents are settled; a save that is still under way goes first, and of
        those that wait only the newest is made.
        """
        if self._due(step) and self._saved == step:
            await self._save(step)

    async def condemned(self) -> None:
        """What has served was found guilty, and maybe taken back: the last checkpoint must not
        bring it back on a resume."""
        if self._saved and self._cfg.checkpoint.enable:
            await self._save(self._saved)

    async def _save(self, step: int) -> None:
        if self._forge.ptq is None:
            return
        try:
            self._pending = await guard_state.snapshot(self._forge.ptq, step)
        except Exception as error:
            log.warning("the guard state of step %d", step, exc_info=True)
            self._failed(step, error)
            return
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        while self._pending is not None:
            snapshot, self._pending = self._pending, None
            try:
                state = await snapshot.complete()
                await asyncio.to_thread(guard_state.save, self._folder, state)
            except Exception as error:
                log.warning("the guard state of step %d", snapshot.step, exc_info=True)
                self._failed(snapshot.step, error)

    def _failed(self, step: int, error: Exception) -> None:
        self._event(f"the guard state of step {step} is not saved: {_brief(error)}")

    def _event(self, text: str) -> None:
        self._report.add_event(EVENT, text)

    async def close(self) -> None:
        """Waits for what is being saved, and says if the newest checkpoint is an old one."""
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=CLOSE_TIMEOUT_S)
            if not self._writing.done():
                self._event(f"the guard state was still being saved after {CLOSE_TIMEOUT_S:g} s")
        if self._saved < self._step == self._cfg.training.steps and self._cfg.checkpoint.enable:
            self._event(f"the newest checkpoint is of step {self._saved}, not of {self._step}")


def _brief(error: Exception) -> str:
    lines: list[Any] = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
