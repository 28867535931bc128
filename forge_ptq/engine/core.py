"""The state machine of the two slots. Everything here runs on the engine thread.

slot states     empty -> filling -> ready;  one slot is live, the other idle
stage           idle slot: wait until its last sequences ended (or move them), clear, fill
probe           score sequences under the idle slot, in steps of its lane
commit          idle becomes live: new requests start there, running ones finish where they are
rollback        the same flip back, to a slot that has served before
discard         forget a candidate that has never served
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from forge_ptq.engine.layout import FillPlan
from forge_ptq.engine.probe import HiddenCapture, check_sequence, score
from forge_ptq.engine.serving import Pending, Serving, check_tokens
from forge_ptq.engine.slots import SLOTS
from forge_ptq.engine.thread import WAIT, Job
from forge_ptq.engine.types import (
    CommitReport,
    ProbeScore,
    ProbeSequence,
    SlotInfo,
    SlotStateError,
    StageReport,
)

T = TypeVar("T")


@dataclass
class Candidate:
    """What a slot is to be filled with."""

    artifact_id: str
    policy_version: int
    plan: FillPlan
    load_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)


class SlotEngine(Serving):
    """vLLM with two slots; a ``Steppable`` for ``EngineThread``."""

    def __init__(self, engine: LLMEngine, *, idle_lane_tokens: int | None = None) -> None:
        super().__init__(engine, idle_lane_tokens=idle_lane_tokens)
        self.capture = HiddenCapture(self.runner.model, self.runner)
        self.staging = False
        self.probing = 0
        self._fills = itertools.count(1)
        self.slots[0] = SlotInfo(
            artifact_id="checkpoint",
            policy_version=0,
            layers=self.bank.layer_schemes(0),
            state="ready",
            served=True,
            salt="fill-0",
            bytes=self.bank.nbytes(0),
        )

    def stage(self, candidate: Candidate, drain_deadline_s: float) -> Job[StageReport]:
        """Begin to fill the idle slot; refuses at once if that cannot be. The job does the work."""
        if self.staging:
            raise SlotStateError("another artifact is being staged; discard it or wait")
        if self.probing:
            raise SlotStateError("the idle slot is being probed; wait for the scores")
        self.stats.begin_window()
        return _started(self._stage(candidate, drain_deadline_s))

    def _stage(self, candidate: Candidate, drain_deadline_s: float) -> Job[StageReport]:
        slot = self.idle
        begun = time.perf_counter()
        filled = False
        self.staging = True
        try:
            yield None
            resubmitted = yield from self._drain(slot, begun + drain_deadline_s)
            drained = time.perf_counter()
            self.slots[slot] = SlotInfo(state="filling")
            self.bank.activate(self.live)
            self.bank.clear(slot)
            nbytes = candidate.plan.nbytes
            busy = 0.0
            pieces = self.bank.fill(slot, candidate.plan)
            more = True
            while more:
                piece = time.perf_counter()
                more = next(pieces, self) is None
                busy += time.perf_counter() - piece
                yield None
            filled = True
        finally:
            self.staging = False
            if not filled and self.slots[slot].state == "filling":
                self.bank.clear(slot)
                self.slots[slot] = SlotInfo()
        now = time.perf_counter()
        self.slots[slot] = SlotInfo(
            artifact_id=candidate.artifact_id,
            policy_version=candidate.policy_version,
            layers=self.bank.layer_schemes(slot),
            state="ready",
            salt=f"fill-{next(self._fills)}-{candidate.artifact_id}",
            bytes=self.bank.nbytes(slot),
        )
        return StageReport(
            artifact_id=candidate.artifact_id,
            policy_version=candidate.policy_version,
            slot=slot,
            bytes=nbytes,
            stage_s=now - candidate.started,
            load_s=candidate.load_s,
            drain_s=drained - begun,
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
                self._remove(request.request_id)
                request.slot, request.request_id = self.live, self._new_id("again")
                request.resubmitted += 1
                self._admit(request)
            return len(late)
        return 0

    def commit(self, artifact_id: str) -> CommitReport:
        """Make the staged artifact live; SlotStateError unless it is completely staged."""
        info = self.slots[self.idle]
        if self.staging or info.state != "ready" or info.artifact_id != artifact_id:
            held = "an artifact being staged" if self.staging else repr(info.artifact_id)
            raise SlotStateError(f"cannot commit {artifact_id!r}: the idle slot holds {held}")
        if self.probing:
            raise SlotStateError(f"cannot commit {artifact_id!r}: it is being probed")
        return self._flip()

    def rollback(self) -> CommitReport:
        """Go back to the slot that served before; SlotStateError if it is gone or never served."""
        info = self.slots[self.idle]
        if self.staging or self.probing or info.state != "ready" or not info.served:
            raise SlotStateError("cannot roll back: the idle slot holds no version that has served")
        self.stats.begin_window()
        report = self._flip()
        self.slots[self.idle].served = False  # rolling forward again takes a commit
        return report

    def _flip(self) -> CommitReport:
        started = time.perf_counter()
        self.bank.live = self.idle
        self.bank.activate(self.bank.live)
        flip_s = time.perf_counter() - started
        info = self.slots[self.live]
        info.served = True
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

    def discard(self) -> bool:
        """Empty the idle slot if it holds a candidate that never served; True if it did."""
        info = self.slots[self.idle]
        if self.staging or self.probing or info.state != "ready" or info.served:
            return False
        if self._serving[self.idle]:
            return False  # a version that was rolled back still finishes its sequences
        self.bank.activate(self.live)
        self.bank.clear(self.idle)
        self.slots[self.idle] = SlotInfo()
        return True

    def probe(self, sequences: list[ProbeSequence]) -> Job[list[ProbeScore]]:
        """Begin to score sequences under the idle slot; refuses at once if it is not ready."""
        info = self.slots[self.idle]
        if self.staging or info.state != "ready":
            raise SlotStateError("cannot probe: no artifact is completely staged in the idle slot")
        counts = [check_sequence(s, self.hidden_size) for s in sequences]
        for sequence in sequences:
            check_tokens(sequence.token_ids[:-1], self.max_model_len, self.vocab_size)
            check_tokens(sequence.token_ids[-1:], self.max_model_len, self.vocab_size)
        return _started(self._probe(self.idle, sequences, counts))

    def _probe(
        self, slot: int, sequences: list[ProbeSequence], counts: list[int]
    ) -> Job[list[ProbeScore]]:
        requests: list[Pending] = []
        self.probing += 1
        try:
            yield None
            params = SamplingParams(
                max_tokens=1,
                temperature=0.0,
                detokenize=False,
                ignore_eos=True,
                skip_reading_prefix_cache=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for sequence, count in zip(sequences, counts, strict=True):
                prompt = list(sequence.token_ids[:-1])
                request = Pending(self._new_id("probe"), prompt, params, 0, slot, None, 0.0)
                self._admit(request)
                requests.append(request)
                first = sequence.response_start - 1
                self.capture.want(request.internal_id, first, count, self.hidden_size)
                yield None
            while any(request.request_id in self._pending for request in requests):
                yield WAIT
            hidden = [self.capture.take(request.internal_id) for request in requests]
            logits = self.runner.model.logits_processor
            return (
                yield from score(
                    sequences,
                    hidden,
                    self.bank.head_weight(slot),
                    scale=logits.scale,
                    soft_cap=logits.soft_cap,
                )
            )
        finally:
            self.probing -= 1
            for request in requests:
                self._remove(request.request_id)
                self.capture.drop(request.internal_id)

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
                    "served": self.slots[s].served,
                    "bytes": self.slots[s].bytes,
                    "sequences": self._serving[s],
                }
                for s in SLOTS
            ],
            "steps": self.stats.steps,
            "step_s_median": self.stats.step_s_median(),
            "longest_pause_s": self.stats.longest_pause_s,
        }


def _started(job: Job[T]) -> Job[T]:
    """Run a job to its first yield, so that closing it always runs its ``finally``."""
    next(job)
    return job
