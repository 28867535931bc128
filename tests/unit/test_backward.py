"""Gradients of a step over ranks that are not there: what their collectives would return."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_ptq.loss import GRPOLoss
from forge_ptq.training import backward as module
from forge_ptq.training.backward import Gradients, backward

VOCAB, REQUEST, RESPONSE = 7, 3, 4


class Policy(torch.nn.Module):
    """Logits of the next token from this one alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCAB, 5)
        self.lm_head = torch.nn.Linear(5, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.embedding(tokens))


def step(size: int, loss: Any, copies: int = 1) -> tuple[Gradients, list[Any]]:
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (size, REQUEST + RESPONSE), generator=g)
    mask = torch.arange(RESPONSE) < torch.tensor([4, 1, 3, 2, 4])[:size].unsqueeze(1)
    logprobs = -2 + torch.randn(size, RESPONSE, generator=g)
    inputs = {"tokens": tokens, "prompt_lens": torch.full((size,), REQUEST)}
    targets = {
        "response": tokens[:, REQUEST:],
        "padding_mask": mask,
        "ref_logprobs": logprobs,
        "generator_logprobs": logprobs + 0.1,
        "advantages": torch.randn(size, 1, generator=g),
    }
    built: Any = SimpleNamespace(model=Policy(), seq_len=16, parallel_dims=None, copies=copies)
    done = backward(built, loss, inputs, targets, micro_batch=2)
    return done, [p.grad for p in built.model.parameters()]


def plain(logits: torch.Tensor, response: torch.Tensor, padding_mask: torch.Tensor) -> torch.Tensor:
    """In torchforge's form: the mean over its batch."""
    picked = logits.log_softmax(-1).gather(-1, response.unsqueeze(-1)).squeeze(-1)
    return -(picked * padding_mask).sum(1).mean()


LOSSES = [
    GRPOLoss(aggregation="token_mean", rollout_correction="icepop"),
    GRPOLoss(aggregation="sequence_mean"),
    plain,
]


@pytest.mark.parametrize("loss", LOSSES, ids=["token_mean", "sequence_mean", "plain"])
def test_ranks_of_tensor_parallelism_count_once(loss, monkeypatch):
    """All of them score the same share and their gradients are not added."""
    alone, gradients = step(5, loss)
    reduce = module.distributed._reduce
    monkeypatch.setattr(
        module.distributed,
        "_reduce",
        lambda values, op: {k: 3 * v for k, v in reduce(values, op).items()},
    )
    shared, same = step(5, loss, copies=3)
    assert shared.loss == pytest.approx(alone.loss)
    assert shared.sums == pytest.approx(alone.sums)
    for a, b in zip(same, gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("loss", LOSSES, ids=["token_mean", "sequence_mean", "plain"])
def test_a_batch_of_nothing_is_a_loss_of_0(loss):
    done, gradients = step(0, loss)
    assert done == Gradients(loss=0.0, sums={}, maxima={}, rows=None)
    assert gradients == [None, None, None]
