"""Filling the idle slot while the live one serves. Runs on the engine thread.

The slot is drained first: its last sequences end in it, or, past the deadline, start again on the
live slot. Then it is cleared and filled layer by layer between engine steps. Whatever goes wrong,
and a discard in the middle, leaves it empty, never half filled.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from forge_ptq.engine.layout import FillPlan
from forge_ptq.engine.memory import let_go, out_of_memory
from forge_ptq.engine.probing import Probing
from forge_ptq.engine.thread import WAIT, Job, begun
from forge_ptq.engine.types import Role, SlotInfo, SlotMemoryError, SlotStateError, StageReport


@dataclass
class Candidate:
    """What a slot is to be filled with."""

    artifact_id: str
    policy_version: int
    plan: FillPlan
    load_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)


class Staging(Probing):
    """The filling side of ``SlotEngine``."""

    fills = 0
    """Times that a slot has been filled."""

    def stage(self, candidate: Candidate, drain_deadline_s: float) -> Job[StageReport]:
        """Begin to fill the idle slot; refuses at once if that cannot be. The job does the work.

        SlotMemoryError if memory does not suffice: the slot is empty then, and live serves on.
        """
        self._check_idle()
        return begun(self._stage(candidate, drain_deadline_s, "candidate"))

    def accompany(self, candidate: Candidate, drain_deadline_s: float) -> Job[StageReport]:
        """Begin to stage the live version in full precision as companion, as ``stage`` does.

        SlotStateError unless it is of the live version and all in bf16.
        """
        self._check_idle()
        live = self.slots[self.live]
        if candidate.policy_version != live.policy_version:
            raise SlotStateError(
                f"{candidate.artifact_id!r} is of version {candidate.policy_version}, expected the "
                f"live version {live.policy_version}: arms may differ in precision only"
            )
        for name, parts in candidate.plan.linears.items():
            if "weight_scale" in parts:
                raise SlotStateError(
                    f"{candidate.artifact_id!r}: {name} is quantized, a companion is all bf16"
                )
        return begun(self._stage(candidate, drain_deadline_s, "companion"))

    def _check_idle(self) -> None:
        if self.staging:
            raise SlotStateError("another artifact is being staged; discard it or wait")
        if self.probing:
            raise SlotStateError("the idle slot is being probed; wait for the scores")

    def _stage(self, candidate: Candidate, drain_deadline_s: float, role: Role) -> Job[StageReport]:
        slot = self.idle
        started = time.perf_counter()
        filled = False
        self.stats.begin_window()
        self.staging = True
        if self.slots[slot].role == "companion":
            self.slots[slot].role = "retired"
        nbytes = candidate.plan.nbytes
        try:
            yield None
            resubmitted = yield from self._drain(slot, started + drain_deadline_s)
            drained = time.perf_counter()
            self.slots[slot] = SlotInfo(state="filling")
            self.bank.activate(self.live)
            self.bank.clear(slot)
            busy = 0.0
            pieces = self.bank.fill(slot, candidate.plan)
            more = True
            while more:
                piece = time.perf_counter()
                more = next(pieces, self) is None
                busy += time.perf_counter() - piece
                yield None
            filled = True
        except Exception as error:
            if not out_of_memory(error):
                raise
            let_go(error)
            raise SlotMemoryError(
                f"{candidate.artifact_id}: not enough memory to fill slot {slot} with its {nbytes} "
                f"bytes beside the {self.slots[self.live].bytes} of the live slot: {error}"
            ) from error
        finally:
            self.staging = False
            if not filled:
                candidate.plan.linears.clear()
                candidate.plan.rest.clear()
                if self.slots[slot].state == "filling":
                    self.bank.clear(slot)
                    self.slots[slot] = SlotInfo()
        now = time.perf_counter()
        self.fills += 1
        self.slots[slot] = SlotInfo(
            artifact_id=candidate.artifact_id,
            policy_version=candidate.policy_version,
            layers=self.bank.layer_schemes(slot),
            state="ready",
            role=role,
            salt=f"fill-{self.fills}-{candidate.artifact_id}",
            bytes=self.bank.nbytes(slot),
        )
        if role == "companion":
            self.bank.companion = slot
        return StageReport(
            artifact_id=candidate.artifact_id,
            policy_version=candidate.policy_version,
            slot=slot,
            bytes=nbytes,
            stage_s=now - candidate.started,
            load_s=candidate.load_s,
            drain_s=drained - started,
            fill_s=now - drained,
            busy_s=busy,
            resubmitted=resubmitted,
        )

    def _drain(self, slot: int, deadline: float) -> Job[int]:
        """Wait for an idle slot's sequences; past the deadline restart them on the live one."""
        while self._serving[slot]:
            if time.perf_counter() < deadline:
                yield WAIT
                continue
            late = [r for r in self._pending.values() if r.slot == slot and r.future is not None]
            for request in late:
                self.restart(request)
            return len(late)
        return 0
