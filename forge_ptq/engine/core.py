"""The state machine of the two slots. Everything here runs on the engine thread.

    slot states     empty -> filling -> ready;  one slot is live, the other idle
    stage           idle slot: wait until its last sequences ended (or move them), clear, fill
    probe           score sequences under the idle slot, in steps of its lane
    commit          idle becomes live: new requests start there, running ones finish where they are
    rollback        the same flip back, to a slot that has served before
    discard         forget a candidate that has never served

Every request is one sequence, pinned to the slot that is live when it is admitted, so its tokens
come from one version. ``cache_salt`` names the filling of the slot: no prefix-cache block is ever
shared between two fillings.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from forge_ptq.engine.build import model_runner
from forge_ptq.engine.lanes import SLOT_KEY, LaneScheduler
from forge_ptq.engine.layout import FillPlan
from forge_ptq.engine.probe import HiddenCapture, check_sequence, score
from forge_ptq.engine.slots import SLOTS, SlotBank
from forge_ptq.engine.stats import StepStats
from forge_ptq.engine.thread import WAIT, Job
from forge_ptq.engine.types import (
    CommitReport,
    ProbeScore,
    ProbeSequence,
    RequestError,
    Sample,
    SlotInfo,
    SlotStateError,
    StageReport,
)

T = TypeVar("T")


@dataclass
class _Pending:
    """A sequence in the engine. ``internal_id`` is vLLM's."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int
    slot: int
    future: Future[Sample] | None
    admitted: float
    internal_id: str = ""
    resubmitted: int = 0


@dataclass
class Candidate:
    """What a slot is to be filled with."""

    artifact_id: str
    policy_version: int
    plan: FillPlan
    load_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)


class SlotEngine:
    """vLLM with two slots; a ``Steppable`` for ``EngineThread``."""

    def __init__(self, engine: LLMEngine, *, idle_lane_tokens: int | None = None) -> None:
        self.engine = engine
        self.runner = model_runner(engine)
        self.bank: SlotBank = engine.vllm_config.quant_config.bank  # type: ignore[union-attr]
        scheduler = engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
        if not isinstance(scheduler, LaneScheduler):
            raise RuntimeError(f"expected a LaneScheduler, the engine has {type(scheduler)}")
        self.scheduler = scheduler
        if idle_lane_tokens is not None:
            scheduler.idle_lane_tokens = idle_lane_tokens
        config = engine.vllm_config.model_config
        self.max_model_len = int(config.max_model_len)
        self.hidden_size = int(config.get_hidden_size())
        self.capture = HiddenCapture(self.runner.model, self.runner)
        self.stats = StepStats()
        self.slots = [SlotInfo(), SlotInfo()]
        self.slots[0] = SlotInfo(
            "checkpoint", 0, {"bf16": len(self.bank.layout.hf_linears())}, "ready", True, "fill-0"
        )
        self.slots[0].bytes = self.bank.nbytes(0)
        self.staging = False
        self.probing = 0
        self._pending: dict[str, _Pending] = {}
        self._serving = [0, 0]
        self._ids = itertools.count()
        self._fills = itertools.count(1)

    @property
    def live(self) -> int:
        """The slot of new requests."""
        return self.bank.live

    @property
    def idle(self) -> int:
        """The other slot."""
        return 1 - self.bank.live

    # ---- requests

    def submit(
        self, prompt_ids: list[int], params: list[SamplingParams], priority: int = 0
    ) -> list[tuple[str, Future[Sample]]]:
        """Admit one sequence per entry of ``params``; all or none. RequestError if refused."""
        admitted: list[_Pending] = []
        try:
            for one in params:
                request = _Pending(
                    self._new_id("gen"), prompt_ids, one, priority, self.live, Future(), 0.0
                )
                self._admit(request)
                admitted.append(request)
        except Exception as error:
            self.abort([request.request_id for request in admitted])
            if isinstance(error, ValueError | TypeError):
                raise RequestError(f"request refused: {error}") from error
            raise
        return [(r.request_id, r.future) for r in admitted if r.future is not None]

    def abort(self, request_ids: list[str]) -> None:
        """Remove sequences from the engine; their futures are cancelled. Unknown ids pass."""
        for request_id in request_ids:
            request = self._remove(request_id)
            if request is not None and request.future is not None:
                request.future.cancel()

    def _new_id(self, kind: str) -> str:
        return f"{kind}-{next(self._ids)}"

    def _admit(self, request: _Pending) -> None:
        params = request.params.clone()
        params.extra_args = {**(params.extra_args or {}), SLOT_KEY: request.slot}
        salt = self.slots[request.slot].salt
        if request.future is None:
            salt = f"{salt}/{request.request_id}"  # a probe shares no cached block with anyone
        prompt: Any = {"prompt_token_ids": request.prompt_ids, "cache_salt": salt}
        request.internal_id = self.engine.add_request(
            request.request_id, prompt, params, priority=request.priority
        )
        request.admitted = request.admitted or time.perf_counter()
        self._pending[request.request_id] = request
        if request.future is not None:
            self._serving[request.slot] += 1
            self.stats.admitted(request.slot, time.perf_counter())

    def _forget(self, request: _Pending) -> None:
        del self._pending[request.request_id]
        if request.future is not None:
            self._serving[request.slot] -= 1

    def _remove(self, request_id: str) -> _Pending | None:
        request = self._pending.get(request_id)
        if request is None:
            return None
        self.engine.abort_request([request_id])
        self._forget(request)
        if not self._serving[request.slot]:
            self.stats.left(request.slot)
        return request

    # ---- stepping

    def has_work(self) -> bool:
        """Whether requests are unfinished."""
        return self.engine.has_unfinished_requests()

    def step(self) -> None:
        """One engine step of one lane."""
        started = time.perf_counter()
        outputs = self.engine.step()
        ended = time.perf_counter()
        slot = self.scheduler.step_slot
        served = self._serving[slot] > 0
        for output in outputs:
            if output.finished:
                self._finish(output)
        if served:
            self.stats.stepped(slot, started, ended, self._serving[slot] > 0)

    def step_s_median(self) -> float:
        """The usual duration of a serving step in seconds."""
        return self.stats.step_s_median()

    def _finish(self, output: Any) -> None:
        request = self._pending.get(output.request_id)
        if request is None:
            return
        self._forget(request)
        future = request.future
        if future is None or not future.set_running_or_notify_cancel():
            return
        completion = output.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            future.set_exception(
                RuntimeError(f"vLLM ended {request.request_id} with {completion.finish_reason!r}")
            )
            return
        info = self.slots[request.slot]
        assert info.artifact_id is not None
        assert info.policy_version is not None
        token_ids = list(completion.token_ids)
        future.set_result(
            Sample(
                prompt_ids=request.prompt_ids,
                token_ids=token_ids,
                logprobs=_sampled_logprobs(completion.logprobs, token_ids),
                text=completion.text,
                stop_reason=completion.finish_reason,
                policy_version=info.policy_version,
                artifact_id=info.artifact_id,
                scheme_tag=info.scheme_tag,
                slot=request.slot,
                resubmitted=request.resubmitted,
                queue_to_done_s=time.perf_counter() - request.admitted,
            )
        )

    def fail_all(self, error: BaseException) -> None:
        """Fail every pending sequence."""
        for request in list(self._pending.values()):
            future = request.future
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(error)
        self._pending.clear()

    def close(self) -> None:
        """Shut vLLM down."""
        self.engine.engine_core.shutdown()

    # ---- slots

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
            schemes, nbytes = dict(candidate.plan.scheme_counts), candidate.plan.nbytes
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
            schemes=schemes,
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

    # ---- probing

    def probe(self, sequences: list[ProbeSequence]) -> Job[list[ProbeScore]]:
        """Begin to score sequences under the idle slot; refuses at once if it is not ready."""
        info = self.slots[self.idle]
        if self.staging or info.state != "ready":
            raise SlotStateError("cannot probe: no artifact is completely staged in the idle slot")
        counts = [check_sequence(s, self.max_model_len, self.hidden_size) for s in sequences]
        return _started(self._probe(self.idle, sequences, counts))

    def _probe(
        self, slot: int, sequences: list[ProbeSequence], counts: list[int]
    ) -> Job[list[ProbeScore]]:
        requests: list[_Pending] = []
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
                request = _Pending(self._new_id("probe"), prompt, params, 0, slot, None, 0.0)
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
                    "schemes": dict(self.slots[s].schemes),
                    "layers": self.bank.layer_schemes(s),
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


def _sampled_logprobs(logprobs: Any, token_ids: list[int]) -> list[float]:
    """The logprob of each sampled token, natural logarithm."""
    if logprobs is None:
        raise RuntimeError("vLLM returned no logprobs")
    return [float(place[token].logprob) for place, token in zip(logprobs, token_ids, strict=True)]
