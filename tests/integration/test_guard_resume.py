"""Saving beside the trainer's checkpoints and restoring into a fresh store, with the real store."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from apps.grpo_ptq import saving as saving_module
from apps.grpo_ptq.saving import Saving, restore
from forge_ptq import guard_state, runtime, store, store_io, store_stats
from forge_ptq.config import PTQConfig
from forge_ptq.observe.report import RunReport
from forge_ptq.observe.run_dir import create_run_dir
from forge_ptq.training import checkpoints
from tests.unit.test_guard_state import PUBLISHER, make, newest, trainer_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def running_runtime():
    await runtime.init_provisioner()
    await store.initialize()
    yield
    await store.shutdown()
    await runtime.shutdown()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def empty_store(running_runtime):
    await store_io.purge(await store_io.keys())


class Run:
    """What `Saving` and `restore` see of a run of 20 steps with a checkpoint every second one."""

    def __init__(self, folder: Any, off_by_n: int = 1) -> None:
        checkpoint = SimpleNamespace(enable=True, interval=2, folder="checkpoint")
        training = SimpleNamespace(steps=20)
        cfg: Any = SimpleNamespace(
            trainer=SimpleNamespace(checkpoint=checkpoint, training=training),
            ptq=PTQConfig(publish_every=1),
            off_by_n=off_by_n,
        )
        self.cfg = cfg
        self.report = RunReport(create_run_dir(folder, "run", "x.yaml"))
        self.folder = self.report.run_dir.checkpoint("checkpoint")
        self.error = self.undone = ""
        self.saved: Any = None

        async def save_errors() -> dict[int, tuple[str, str]]:
            return {0: ("", self.undone), 1: (self.error, "")}

        forge: Any = SimpleNamespace(
            trainer=SimpleNamespace(save_errors=SimpleNamespace(call=save_errors)),
            ptq=SimpleNamespace(
                state=lambda: PUBLISHER, fleet=SimpleNamespace(calibration=make(7).calibration)
            ),
        )
        self.forge = forge
        self.saving = Saving(cfg, forge, self.report)

    async def step(self, step: int, version: int) -> None:
        """A training step that ends while `version` serves."""
        self.saved = make(step, version).artifact
        await store.set_committed(await store.put_artifact(self.saved))
        if step % 2 == 0 and not self.error:
            trainer_checkpoint(self.folder, step)
        await self.saving.trained(step)
        await self.saving.guard(step)

    def events(self) -> list[str]:
        return [event["text"] for event in self.report.summary()["events"]]


async def renewed(run: Run, off_by_n: int = 1) -> Run:
    """The run's next session, over an empty store."""
    await run.saving.close()
    await store_io.purge(await store_io.keys())
    return Run(run.report.run_dir.path.parent, off_by_n)


async def test_a_fresh_store_has_what_served_and_what_was_calibrated(tmp_path):
    run = Run(tmp_path)
    for step in (1, 2, 3, 4, 5):
        await run.step(step, version=step - 1)
    assert run.events() == []
    run = await renewed(run)
    assert guard_state.found(run.folder) == [(2, 1), (4, 1)]
    state: Any = await restore(run.cfg, run.report)
    assert (state.step, state.publisher) == (4, PUBLISHER)
    committed: Any = await store.get_committed()
    assert committed == state.ref
    assert committed.policy_version == 3
    artifact = await store.get_artifact(committed)
    assert artifact.manifest == state.artifact.manifest
    assert await store_stats.calibration_rounds() == [7]
    assert await store_stats.claim_round() == 8


async def test_an_artifact_that_is_too_old_stays_out(tmp_path):
    run = Run(tmp_path)
    await run.step(4, version=3)
    run = await renewed(run, off_by_n=0)
    await restore(run.cfg, run.report)
    assert await store.get_committed() is None
    assert await store.artifact_ids() == []
    assert await store_stats.calibration_rounds() == [7]


@pytest.mark.parametrize(("back_to", "restored"), [(3, True), (5, False)])
async def test_what_was_rolled_back_after_the_checkpoint_does_not_come_back(
    tmp_path, back_to, restored
):
    """To an older artifact, or to a version in bf16 that is newer than the checkpoint."""
    run = Run(tmp_path)
    await run.step(4, version=4)
    guilty: Any = await store.get_committed()
    await run.step(5, version=back_to)
    await run.saving.condemned()
    run = await renewed(run)
    state: Any = await restore(run.cfg, run.report)
    assert (state.step, state.ref.policy_version) == (4, back_to)
    assert state.ref != guilty
    assert await store.get_committed() == (state.ref if restored else None)


async def test_a_damaged_one_is_told_of_and_the_run_calibrates_anew(tmp_path):
    run = Run(tmp_path)
    await run.step(2, version=1)
    run = await renewed(run)
    (run.folder / "guard-00000002-0001" / guard_state.STATE).write_text("{")
    assert await restore(run.cfg, run.report) is None
    (event,) = run.events()
    assert "guard-00000002-0001 is not used" in event
    assert await store.get_committed() is None
    assert await store_stats.calibration_rounds() == []


async def test_states_of_steps_that_are_trained_anew_go(tmp_path):
    run = Run(tmp_path)
    await run.step(2, version=1)
    await run.step(4, version=3)
    run = await renewed(run)
    (checkpoints.path_of(run.folder, 4) / ".metadata").unlink()  # it never became whole
    state: Any = await restore(run.cfg, run.report)
    assert state.step == 2
    assert guard_state.found(run.folder) == [(2, 1)]


async def test_a_checkpoint_that_was_not_saved_is_told_of_and_has_no_guard_state(tmp_path):
    run = Run(tmp_path)
    await run.step(18, version=17)
    run.error = "rank 1: no space"
    await run.step(20, version=19)
    await run.saving.close()
    assert run.events() == [
        "the checkpoint of step 20 is not saved: rank 1: no space",
        "the newest checkpoint is of step 18, not of 20",
    ]
    assert guard_state.found(run.folder) == [(18, 1)]


async def test_what_failed_beside_a_saved_checkpoint_is_told_of_and_costs_no_guard_state(tmp_path):
    run = Run(tmp_path)
    run.undone = "hf: no space"
    await run.step(20, version=19)
    await run.saving.close()
    assert run.events() == ["left undone after step 20: hf: no space"]
    assert guard_state.found(run.folder) == [(20, 1)]


async def test_writing_holds_nothing_up_and_failing_ends_nothing(tmp_path, monkeypatch):
    run = Run(tmp_path)
    go, real, threads = threading.Event(), guard_state.save, []

    def slow(folder: Any, state: Any) -> Any:
        threads.append(threading.current_thread())
        assert go.wait(10)
        if state.step == 4:
            raise OSError(28, "No space left on device")
        return real(folder, state)

    monkeypatch.setattr(saving_module.guard_state, "save", slow)
    async with asyncio.timeout(10):
        for step in (2, 4, 6, 8):  # while the first is being written
            await run.step(step, version=step - 1)
    go.set()
    await run.saving.close()
    assert threading.main_thread() not in threads
    assert guard_state.found(run.folder) == [(2, 1), (8, 1)], "of those that wait, the newest"
    monkeypatch.setattr(saving_module.guard_state, "save", slow)
    await run.step(4, version=3)
    await run.saving.close()
    (event,) = run.events()
    assert event == (
        "the guard state of step 4 is not saved: OSError: [Errno 28] No space left on device"
    )
    assert newest(run.folder, 20).step == 8


async def test_a_store_that_is_gone_is_told_of(tmp_path):  # the last one: it stays away
    run = Run(tmp_path)
    await run.step(2, version=1)
    await store.shutdown()
    trainer_checkpoint(run.folder, 4)
    await run.saving.trained(4)
    await run.saving.guard(4)
    await run.saving.close()
    assert any("the guard state of step 4 is not saved" in event for event in run.events())
