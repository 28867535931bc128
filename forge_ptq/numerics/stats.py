"""What a calibration remembers of one linear input: counts, per-channel ranges, a histogram of |x|.

Everything a scale is chosen from later is in here, and merging is associative and commutative:
counts and histograms add, ranges take the maximum. So ranks can see any split of the rollouts, in
any order, and counts, histogram and absmax come out exactly as from one pass over all of them.

The histogram is logarithmic with 8 bins per octave over 2^-16 .. 2^16. A bin is not computed with
a logarithm but read off the fp32 bit pattern: exponent and the top three mantissa bits are the bin,
up to a constant. Edges are therefore ``2^e (1 + m/8)``, exactly representable in bf16 and fp32,
and every device and dtype agrees on the bin of every value. Dividing x by a power of two (as
power-of-two smoothing does) moves it by whole octaves, and never across a bin's edge. The first
bin also takes everything smaller, zero included; the last one everything larger.

A non-finite element is counted and left out of everything else.

Shape suffixes: T tokens, C channels (input features of the linear), B bins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

BINS_PER_OCTAVE = 8
MIN_EXPONENT = -16
MAX_EXPONENT = 16
BINS = (MAX_EXPONENT - MIN_EXPONENT) * BINS_PER_OCTAVE

MANTISSA_SHIFT = 20
"""Bits of an fp32 pattern below the three mantissa bits that belong to the bin."""

FIRST_CODE = (127 + MIN_EXPONENT) * BINS_PER_OCTAVE
"""``bits >> MANTISSA_SHIFT`` of the smallest value whose bin is not bin 0's overflow."""


def bin_edges() -> torch.Tensor:
    """Edges [BINS + 1] fp64, ascending; bin b holds edges[b] <= |x| < edges[b + 1]."""
    index = torch.arange(BINS + 1, dtype=torch.int64)
    octave = torch.exp2((index // BINS_PER_OCTAVE + MIN_EXPONENT).to(torch.float64))
    return octave * (1 + (index % BINS_PER_OCTAVE).to(torch.float64) / BINS_PER_OCTAVE)


def bin_index(x: torch.Tensor) -> torch.Tensor:
    """Bin of |x| for every element, int32 in [0, BINS), same shape; x floating and finite."""
    bits = x.detach().to(torch.float32).abs().contiguous().view(torch.int32)
    return (bits >> MANTISSA_SHIFT).sub_(FIRST_CODE).clamp_(0, BINS - 1)


@dataclass(eq=False)
class ActivationStats:
    """Statistics of one site (the input of one linear, or of several that share it)."""

    tokens: int
    """Positions seen; the same on every tensor-parallel rank that saw them."""

    absmax_C: torch.Tensor
    """max|x| per channel, fp32 [C]; 0 where nothing finite was seen."""

    sum_sq_C: torch.Tensor
    """Sum of x^2 per channel, fp64 [C]."""

    sum: float
    """Sum of x."""

    histogram_B: torch.Tensor
    """Number of finite elements per bin of |x|, int64 [BINS]."""

    non_finite: int
    """Elements that were NaN or infinite; nothing else counts them."""

    @classmethod
    def empty(cls, channels: int) -> ActivationStats:
        """Statistics of no token at all: the neutral element of merging."""
        return cls(
            tokens=0,
            absmax_C=torch.zeros(channels, dtype=torch.float32),
            sum_sq_C=torch.zeros(channels, dtype=torch.float64),
            sum=0.0,
            histogram_B=torch.zeros(BINS, dtype=torch.int64),
            non_finite=0,
        )

    @property
    def channels(self) -> int:
        """C."""
        return self.absmax_C.shape[0]

    @property
    def count(self) -> int:
        """Finite elements seen."""
        return int(self.histogram_B.sum())

    @property
    def absmax(self) -> float:
        """max|x| over all channels, 0.0 if nothing was seen."""
        return float(self.absmax_C.max()) if self.channels else 0.0

    @property
    def mean(self) -> float:
        """Mean of x over finite elements, 0.0 if there are none."""
        return self.sum / self.count if self.count else 0.0

    @property
    def mean_square(self) -> float:
        """Mean of x^2 over finite elements, 0.0 if there are none."""
        return float(self.sum_sq_C.sum()) / self.count if self.count else 0.0

    def merge(self, other: ActivationStats) -> ActivationStats:
        """Statistics of both sets of tokens; neither operand changes.

        ValueError if the two differ in channels.
        """
        if self.channels != other.channels:
            raise ValueError(
                f"statistics of {self.channels} and of {other.channels} channels do not merge"
            )
        return ActivationStats(
            tokens=self.tokens + other.tokens,
            absmax_C=torch.maximum(self.absmax_C, other.absmax_C),
            sum_sq_C=self.sum_sq_C + other.sum_sq_C,
            sum=self.sum + other.sum,
            histogram_B=self.histogram_B + other.histogram_B,
            non_finite=self.non_finite + other.non_finite,
        )

    __add__ = merge


@torch.no_grad()
def measure(x_TC: torch.Tensor) -> ActivationStats:
    """Statistics of x_TC, floating [..., T, C], in the plainest way.

    The reference for the observer's fast path, and good enough wherever speed does not matter.
    """
    x_TC = x_TC.detach().flatten(0, -2).to("cpu", torch.float64)
    finite_TC = torch.isfinite(x_TC)
    kept_TC = torch.where(finite_TC, x_TC, 0.0)
    absmax_C = kept_TC.abs().amax(0) if len(x_TC) else torch.zeros(x_TC.shape[1])
    return ActivationStats(
        tokens=len(x_TC),
        absmax_C=absmax_C.to(torch.float32),
        sum_sq_C=kept_TC.square().sum(0),
        sum=float(kept_TC.sum()),
        histogram_B=torch.bincount(bin_index(x_TC[finite_TC]), minlength=BINS),
        non_finite=int((~finite_TC).sum()),
    )


def merge_all(parts: Iterable[ActivationStats], channels: int) -> ActivationStats:
    """All of them merged in the given order; ``empty(channels)`` if there are none."""
    total = ActivationStats.empty(channels)
    for part in parts:
        total = total.merge(part)
    return total
