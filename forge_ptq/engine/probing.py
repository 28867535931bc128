"""Scoring sequences under the idle slot, in steps of its lane. Runs on the engine thread."""

from __future__ import annotations

from functools import cached_property

from vllm.sampling_params import RequestOutputKind, SamplingParams

from forge_ptq.engine.probe import HiddenCapture, check_sequence, score
from forge_ptq.engine.serving import Pending, Serving, check_tokens
from forge_ptq.engine.thread import WAIT, Job, begun
from forge_ptq.engine.types import ProbeScore, ProbeSequence, SlotStateError


class Probing(Serving):
    """The probe side of ``SlotEngine``. ``probing``: probes that run."""

    staging = False
    probing = 0

    @cached_property
    def capture(self) -> HiddenCapture:
        """Hooked into the model before the first probe."""
        return HiddenCapture(self.runner.model, self.runner)

    def probe(self, sequences: list[ProbeSequence]) -> Job[list[ProbeScore]]:
        """Begin to score sequences under the idle slot; refuses at once if it is not ready."""
        info = self.slots[self.idle]
        if self.staging or info.state != "ready":
            raise SlotStateError("cannot probe: no artifact is completely staged in the idle slot")
        if info.role not in ("candidate", "previous"):
            raise SlotStateError(
                f"cannot probe: the idle slot holds {info.artifact_id!r} as {info.role}"
            )
        counts = [check_sequence(s, self.hidden_size) for s in sequences]
        for sequence in sequences:
            check_tokens(sequence.token_ids[:-1], self.max_model_len, self.vocab_size)
            check_tokens(sequence.token_ids[-1:], self.max_model_len, self.vocab_size)
        return begun(self._probe(self.idle, sequences, counts))

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
