"""Sums over trained sequences that probation judges by, per age of the policy. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_ptq.mismatch import SequenceMismatch


@dataclass
class Sums:
    """Of sequences: how many, and the sums over their tokens."""

    episodes: float = 0.0
    tokens: float = 0.0
    k3: float = 0.0
    ratio: float = 0.0
    ratio_sq: float = 0.0
    left_out: float = 0.0
    """Tokens that a mask or the veto leaves out of the loss."""
    rejected: float = 0.0
    """Sequences that were sampled with log-probabilities that are not finite."""

    def add(self, other: Sums, weight: float = 1.0) -> None:
        """Add other's, times weight."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + weight * value)

    @property
    def mismatch(self) -> float:
        """k3 per token, nats; 0 without tokens."""
        return self.k3 / self.tokens if self.tokens else 0.0

    @property
    def share_left_out(self) -> float:
        """Of the tokens; 0 without tokens."""
        return self.left_out / self.tokens if self.tokens else 0.0

    @property
    def ess(self) -> float:
        """Effective sample size as a share of the tokens; 1 without tokens."""
        if not self.tokens:
            return 1.0
        return self.ratio**2 / (self.tokens * self.ratio_sq) if self.ratio_sq else 0.0


def sums_of(record: SequenceMismatch) -> Sums | None:
    """One sequence's; None where the trainer alone has no finite log-probabilities of it."""
    sums = (record.k3_sum, record.ratio_sum, record.ratio_sq_sum)
    finite = all(math.isfinite(value) for value in sums)
    if not record.sampled_finite:
        return Sums(1, record.tokens, *sums, rejected=1) if finite else Sums(1, rejected=1)
    counts = finite and not record.rejected
    return Sums(1, record.tokens, *sums, left_out=record.left_out) if counts else None


Ages = dict[int, Sums]
"""Sums by age."""


def plain(ages: Ages) -> dict[str, dict[str, float]]:
    """As JSON."""
    return {str(age): asdict(sums) for age, sums in ages.items()}


def ages_of(record: Mapping[str, Any]) -> Ages:
    """Inverse of ``plain``; sums that are missing are 0."""
    return {int(age): Sums(**sums) for age, sums in record.items()}
