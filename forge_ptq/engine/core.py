"""The state machine of the two slots. Everything here runs on the engine thread.

slot states     empty -> filling -> ready;  one slot is live, the other idle
roles of an idle slot that is ready:

    stage -----> candidate --commit--> live --commit of the other--> previous --rollback--> live
                     |                  |                                |
                  discard      rollback of the other                 next stage
                     v                  v                                v
                  retired           candidate                         (empty)
                     ^
                  discard, next stage
                     |
    accompany -> companion

stage           idle slot: wait until its last sequences ended (or move them), clear, fill
probe           score sequences under the idle slot, in steps of its lane
commit          idle becomes live: new requests start there, running ones finish where they are
rollback        the same flip back, to a slot that was live before
discard         forget a candidate or a companion; a version to roll back to stays
accompany       stage the live version in bf16, to take requests beside the live slot

A companion takes no new request from the moment the next stage or accompany begins, or a discard;
it takes the place of the version before, which can then no longer be rolled back to.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from vllm.v1.engine.llm_engine import LLMEngine

from forge_ptq.engine.admission import Admission
from forge_ptq.engine.slots import SLOTS
from forge_ptq.engine.staging import Staging
from forge_ptq.engine.types import CommitReport, Role, SlotInfo, SlotStateError

log = logging.getLogger(__name__)

CHECKPOINT = "checkpoint"
"""Artifact id of what the engine was started from."""


class SlotEngine(Staging):
    """vLLM with two slots; a ``Steppable`` for ``EngineThread``."""

    def __init__(
        self,
        engine: LLMEngine,
        *,
        idle_lane_tokens: int | None = None,
        admission: Admission | None = None,
    ) -> None:
        super().__init__(engine, idle_lane_tokens=idle_lane_tokens, admission=admission)
        self.slots[0] = SlotInfo(
            artifact_id=CHECKPOINT,
            policy_version=0,
            layers=self.bank.layer_schemes(0),
            state="ready",
            role="live",
            salt="fill-0",
            bytes=self.bank.nbytes(0),
        )

    def commit(self, artifact_id: str) -> CommitReport:
        """Make the staged artifact live; SlotStateError unless it is completely staged."""
        info = self.slots[self.idle]
        if self.staging or info.state != "ready" or info.artifact_id != artifact_id:
            held = "an artifact being staged" if self.staging else repr(info.artifact_id)
            raise SlotStateError(f"cannot commit {artifact_id!r}: the idle slot holds {held}")
        if info.role != "candidate":
            raise SlotStateError(
                f"cannot commit {artifact_id!r}: the idle slot holds it as {info.role}"
            )
        if self.probing:
            raise SlotStateError(f"cannot commit {artifact_id!r}: it is being probed")
        return self._flip("previous")

    def rollback(self, artifact_id: str | None = None) -> CommitReport:
        """Go back to the slot that was live before; SlotStateError if it is gone.

        artifact_id: what it must hold; None takes whatever it holds.
        """
        info = self.slots[self.idle]
        if self.staging or self.probing or info.role != "previous":
            raise SlotStateError("cannot roll back: the idle slot holds no version that has served")
        if artifact_id not in (None, info.artifact_id):
            raise SlotStateError(
                f"cannot roll back to {artifact_id!r}: the slot holds {info.artifact_id!r}"
            )
        self.stats.begin_window()
        return self._flip("candidate")  # rolling forward again takes a commit

    def take_up(self, artifact_id: str | None) -> bool:
        """Serve an artifact (None: the checkpoint) if a slot holds it; whether it serves now.

        What served is retired: it was not what is committed, so nobody may roll back to it.
        """
        artifact_id = artifact_id or CHECKPOINT
        info = self.slots[self.idle]
        if self.slots[self.live].artifact_id == artifact_id:
            return not self.slots[self.live].damaged
        if self.staging or self.probing or info.artifact_id != artifact_id:
            return False
        if info.role not in ("candidate", "previous"):
            return False
        self._flip("retired")
        return True

    def _flip(self, leave: Role) -> CommitReport:
        """Make the idle slot live; ``leave`` is what the other becomes."""
        started = time.perf_counter()
        self.bank.live = self.idle
        self.bank.activate(self.bank.live)
        flip_s = time.perf_counter() - started
        info, before = self.slots[self.live], self.slots[self.idle]
        info.role, before.role = "live", "retired" if before.damaged else leave
        assert info.artifact_id is not None
        assert info.policy_version is not None
        return CommitReport(
            artifact_id=info.artifact_id,
            policy_version=info.policy_version,
            slot=self.live,
            flip_s=flip_s,
            pause_s=self.stats.pause_s,
            step_s_median=self.stats.step_s_median(),
            draining=self._serving[self.idle],
        )

    def discard(self, previous: bool = False) -> bool:
        """Forget what the idle slot holds beside a version to roll back to; True if it did.

        Its sequences finish in it first, if it has any. previous: forget such a version too.
        """
        info = self.slots[self.idle]
        kinds = ("candidate", "companion", "previous") if previous else ("candidate", "companion")
        if self.staging or self.probing or info.role not in kinds:
            return False
        info.role = "retired"
        if not self._serving[self.idle]:
            self.bank.activate(self.live)
            self.bank.clear(self.idle)
            self.slots[self.idle] = SlotInfo()
        return True

    def damage_live(self, layer: str | None = None, factor: float = 64.0) -> str:
        """Debug: multiply the live slot's weight scales of one layer in place; returns its name.

        Default: the last INT8 down_proj, else the last INT8 layer. SlotStateError without one.
        What was damaged can no longer be rolled back to.
        """
        info = self.slots[self.live]
        int8 = [name for name, scheme in info.layers.items() if scheme.startswith("int8")]
        last = [name for name in int8 if name.endswith("down_proj")] or int8
        if layer is None and not last:
            raise SlotStateError(f"{info.artifact_id!r} serves no INT8 layer that can be damaged")
        name = layer or last[-1]
        self.bank.scale_weights(self.live, name, factor)
        info.damaged = True
        info.salt += "-damaged"
        log.warning("damaged on purpose: %s of %s, scales times %g", name, info.artifact_id, factor)
        return name

    def describe(self) -> dict[str, Any]:
        """State for logs and tests."""
        return {
            "kernel": self.bank.kernel_name,
            "live": self.live,
            "staging": self.staging,
            "probing": self.probing,
            "slots": [
                {
                    "artifact_id": self.slots[s].artifact_id,
                    "policy_version": self.slots[s].policy_version,
                    "layers": dict(self.slots[s].layers),
                    "scheme_tag": self.slots[s].scheme_tag,
                    "state": self.slots[s].state,
                    "role": self.slots[s].role,
                    "bytes": self.slots[s].bytes,
                    "sequences": self._serving[s],
                }
                for s in SLOTS
            ],
            "steps": self.stats.steps,
            "step_s_median": self.stats.step_s_median(),
            "longest_pause_s": self.stats.longest_pause_s,
        }
