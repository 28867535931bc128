"""Scores of hidden states against the formulas, written out directly."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from forge_ptq.engine.probe import check_sequence, score
from forge_ptq.engine.types import ProbeScore, ProbeSequence, RequestError


def finish(job: Generator[None, None, list[ProbeScore]]) -> list[ProbeScore]:
    """Run a job to its end."""
    while True:
        try:
            next(job)
        except StopIteration as end:
            return list(end.value)


def sequence_of(total: int, start: int, hidden: torch.Tensor | None = None, v: int = 5000) -> Any:
    tokens = torch.randint(0, v, (total,), generator=torch.Generator().manual_seed(total)).tolist()
    return ProbeSequence(tokens, start, hidden)


@pytest.mark.parametrize("vocab", [7, 2048, 5000])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.5, 20.0)])
def test_scores_equal_the_formulas(vocab: int, scale: float, cap: float | None) -> None:
    torch.manual_seed(vocab)
    head_VH = torch.randn(vocab, 24).bfloat16()
    candidate = [torch.randn(9, 24), torch.randn(40, 24)]
    reference = [h + 0.1 * torch.randn_like(h) for h in candidate]
    sequences = [
        sequence_of(12, 3, reference[0].bfloat16(), vocab),
        sequence_of(41, 1, reference[1], vocab),
    ]
    got = finish(score(sequences, candidate, head_VH, scale=scale, soft_cap=cap))
    for one, h, sequence in zip(got, candidate, sequences, strict=True):
        z = [side.double() @ head_VH.double().t() for side in (h, sequence.reference_hidden)]
        if cap is not None:
            z = [cap * torch.tanh(side / cap) for side in z]
        p, q = (torch.log_softmax(side * scale, -1) for side in z)
        targets = torch.tensor(sequence.token_ids[sequence.response_start :])[:, None]
        close: Any = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(one.logprobs.double(), p.gather(1, targets)[:, 0], **close)
        assert one.reference_logprobs is not None
        assert one.kl is not None
        torch.testing.assert_close(
            one.reference_logprobs.double(), q.gather(1, targets)[:, 0], **close
        )
        torch.testing.assert_close(one.kl.double(), (q.exp() * (q - p)).sum(-1), **close)
        assert one.kl.dtype == one.logprobs.dtype == torch.float32


def test_without_reference_only_logprobs() -> None:
    head_VH = torch.randn(50, 8).bfloat16()
    (one,) = finish(score([sequence_of(5, 2, None, 50)], [torch.randn(3, 8)], head_VH))
    assert one.logprobs.shape == (3,)
    assert one.kl is None
    assert one.reference_logprobs is None


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (ProbeSequence([1, 2, 3], 0), "response_start 0"),
        (ProbeSequence([1, 2, 3], 3), "response_start 3"),
        (ProbeSequence([1, 2, 3], 1, torch.zeros(3, 8)), r"\[2, 8\]"),
        (ProbeSequence([1, 2, 3], 1, torch.zeros(2, 9)), r"\[2, 8\]"),
    ],
)
def test_wrong_sequences_are_refused(sequence: ProbeSequence, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_sequence(sequence, hidden_size=8)
