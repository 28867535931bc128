"""How sequences become forward passes: by length, padded on the right.

A batch is the unit of work of a calibration: which sequences share a forward pass is decided once,
from the sequences alone, so that any split of the batches over replicas computes the same numbers.

Attention is causal, so no real position sees the padding and no mask is needed; positions of
padding are dropped from every result.

Shape suffixes: B sequences, T positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import torch

from forge_ptq.services.sampler import Rollout

BATCH_TOKENS = 4096
"""Positions per forward pass, padding included (one sequence may exceed it)."""


class Sequence_(Protocol):
    """What is scored: token_ids, of which those from response_start on are the response."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def response_start(self) -> int: ...


S = TypeVar("S", bound=Sequence_)


def batch_indices(
    sequences: Sequence[Sequence_], batch_tokens: int = BATCH_TOKENS
) -> list[list[int]]:
    """Indices of the sequences of every batch, in order of length, then of their tokens."""
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens must be positive, got {batch_tokens}")

    def key(index: int) -> tuple[int, list[int], int]:
        sequence = sequences[index]
        return len(sequence.token_ids), sequence.token_ids, sequence.response_start

    batches: list[list[int]] = []
    for index in sorted(range(len(sequences)), key=key):
        longest = len(sequences[index].token_ids)
        if not batches or longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches


def make_batches(rollouts: Sequence[S], batch_tokens: int = BATCH_TOKENS) -> list[list[S]]:
    """The rollouts as batches of at most batch_tokens positions, padding included.

    Depends on the rollouts alone, not on the order they come in.
    """
    batches = batch_indices(rollouts, batch_tokens)
    return [[rollouts[index] for index in batch] for batch in batches]


def shortened(rollouts: Iterable[Rollout], response_tokens: int) -> list[Rollout]:
    """The same rollouts with their responses cut to the first response_tokens (at least 1).

    A plan is decided on many rollouts, not on long ones: tokens of one rollout repeat each other.
    """
    return [
        replace(rollout, token_ids=rollout.token_ids[: rollout.response_start + response_tokens])
        for rollout in rollouts
    ]


def padded(batch: Sequence[Sequence_]) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens_BT int64, mask_BT bool, True on real positions) of a batch that is not empty."""
    longest = max(len(sequence.token_ids) for sequence in batch)
    tokens_BT = torch.zeros(len(batch), longest, dtype=torch.long)
    mask_BT = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, sequence in enumerate(batch):
        ids_T = torch.tensor(sequence.token_ids, dtype=torch.long)
        tokens_BT[row, : len(ids_T)], mask_BT[row, : len(ids_T)] = ids_T, True
    return tokens_BT, mask_BT
