"""Requests in the engine: admission, steps, results. All of it runs on the engine thread.

Every request is one sequence, pinned to one slot when it is admitted (the live one, or its
companion where there is one: admission.py), so its tokens come from one version. ``cache_salt``
names the filling of the slot: no prefix-cache block is ever shared between two fillings, and none
between a probe and anything else.

A sequence that does not leave a slot which is wanted for staging is restarted from its prompt on
the live one. It keeps its future and its id, hence also the deadline of its caller, which runs from
the first admission; after MAX_RESTARTS it fails with RequestError instead, so that one that never
ends is not taken along for ever where callers set no deadline.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from forge_ptq.engine.admission import LIVE, Admission, Choice
from forge_ptq.engine.build import model_runner
from forge_ptq.engine.lanes import SLOT_KEY, LaneScheduler
from forge_ptq.engine.slots import SlotBank
from forge_ptq.engine.stats import StepStats
from forge_ptq.engine.types import RequestError, Sample, SlotInfo

IDLE_LANE_TOKENS = {"cpu": 64, "cuda": 1024}
"""Default per device: a probe step then costs about as much as a decoding step."""

MAX_RESTARTS = 3
"""Times that one sequence is moved to the live slot because its own is wanted."""


@dataclass
class Pending:
    """A sequence in the engine. ``internal_id`` is vLLM's."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int
    slot: int
    future: Future[Sample] | None
    admitted: float
    choice: Choice = LIVE
    internal_id: str = ""
    resubmitted: int = 0


class Serving:
    """The request side of ``SlotEngine``. ``slots`` says what each slot holds."""

    def __init__(
        self,
        engine: LLMEngine,
        *,
        idle_lane_tokens: int | None = None,
        admission: Admission | None = None,
    ) -> None:
        self.engine = engine
        self.admission = admission or Admission()
        self.runner = model_runner(engine)
        self.bank: SlotBank = engine.vllm_config.quant_config.bank  # type: ignore[union-attr]
        scheduler = engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
        if not isinstance(scheduler, LaneScheduler):
            raise RuntimeError(f"expected a LaneScheduler, the engine has {type(scheduler)}")
        self.scheduler = scheduler
        device = engine.vllm_config.device_config.device_type
        scheduler.idle_lane_tokens = idle_lane_tokens or IDLE_LANE_TOKENS[device]
        config = engine.vllm_config.model_config
        self.max_model_len = int(config.max_model_len)
        self.hidden_size = int(config.get_hidden_size())
        self.vocab_size = int(config.get_vocab_size())
        self.stats = StepStats()
        self.slots = [SlotInfo(), SlotInfo()]
        self._pending: dict[str, Pending] = {}
        self._serving = [0, 0]
        self._ids = itertools.count()

    @property
    def live(self) -> int:
        """The slot of new requests."""
        return self.bank.live

    @property
    def idle(self) -> int:
        """The other slot."""
        return 1 - self.bank.live

    def submit(
        self, prompt_ids: list[int], params: list[SamplingParams], priority: int = 0
    ) -> list[tuple[str, Future[Sample]]]:
        """Admit one sequence per entry of ``params``; all or none. RequestError if refused.

        All of them go to the arm that admission chooses for the prompt.
        """
        check_tokens(prompt_ids, self.max_model_len, self.vocab_size)
        companion = self.slots[self.idle].role == "companion"
        choice = self.admission.choose(prompt_ids, sum(self._serving), companion)
        slot = self.idle if choice.arm == "companion" else self.live
        admitted: list[Pending] = []
        try:
            for one in params:
                request = Pending(
                    self._new_id("gen"), prompt_ids, one, priority, slot, Future(), 0.0, choice
                )
                self._admit(request)
                admitted.append(request)
        except Exception as error:
            self.abort([request.request_id for request in admitted])
            if isinstance(error, ValueError | TypeError | VLLMClientError):
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

    def _admit(self, request: Pending) -> None:
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

    def _forget(self, request: Pending) -> None:
        del self._pending[request.request_id]
        if request.future is not None:
            self._serving[request.slot] -= 1

    def _remove(self, request_id: str) -> Pending | None:
        request = self._pending.get(request_id)
        if request is None:
            return None
        self.engine.abort_request([request_id])
        self._forget(request)
        if not self._serving[request.slot]:
            self.stats.left(request.slot)
        return request

    def restart(self, request: Pending) -> None:
        """Move a sequence to the live slot, from its prompt on; past MAX_RESTARTS fail it."""
        self._remove(request.request_id)
        if request.resubmitted >= MAX_RESTARTS:
            self._fail(
                request,
                RequestError(
                    f"the sequence did not end within its slot's time and was restarted "
                    f"{MAX_RESTARTS} times (drain_deadline_s each); lower max_tokens"
                ),
            )
            return
        request.slot, request.choice = self.live, LIVE
        request.resubmitted += 1
        try:
            self._admit(request)
        except Exception as error:  # noqa: BLE001 - handed to the caller
            self._fail(request, error)

    @staticmethod
    def _fail(request: Pending, error: BaseException) -> None:
        if request.future is not None and request.future.set_running_or_notify_cancel():
            request.future.set_exception(error)

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
                arm=request.choice.arm,
                drawn=request.choice.drawn,
                resubmitted=request.resubmitted,
                queue_to_done_s=time.perf_counter() - request.admitted,
            )
        )

    def fail_all(self, error: BaseException) -> None:
        """Fail every pending sequence."""
        for request in list(self._pending.values()):
            self._fail(request, error)
        self._pending.clear()

    def close(self) -> None:
        """Shut vLLM down."""
        self.engine.engine_core.shutdown()


def check_tokens(token_ids: list[int], max_model_len: int, vocab_size: int) -> None:
    """RequestError unless the tokens can be a prompt (vLLM itself dies of unknown ids)."""
    if not token_ids:
        raise RequestError("the prompt is empty")
    if len(token_ids) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens; with one to generate that is more than "
            f"max_model_len={max_model_len}"
        )
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        raise RequestError(
            f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}"
        )


def _sampled_logprobs(logprobs: Any, token_ids: list[int]) -> list[float]:
    """The logprob of each sampled token, natural logarithm."""
    if logprobs is None:
        raise RuntimeError("vLLM returned no logprobs")
    return [float(place[token].logprob) for place, token in zip(logprobs, token_ids, strict=True)]
