"""Means of tokens that are not independent, and their errors.

Tokens of one rollout move together, and so do rollouts of one prompt. With s_C the sum and n_C the
number of tokens of each cluster, the mean is m = sum(s) / sum(n) and its variance
``C / (C - 1) * sum((s_c - m n_c)^2) / sum(n)^2`` (the ratio estimator's: Cochran, "Sampling
Techniques", 3rd edition, 1977, section 6.4).

Few clusters carry much of the sum (KL is such a quantity), so most means fall short of the truth a
little while their errors come out small too, and Student's symmetric interval lies wholly under the
truth far too often: 5.5 % of the time instead of 2.5 % on KL of 32 real rollouts. So intervals are
Student's with C - 1 degrees of freedom, corrected for the skewness g of the clusters' residuals by
Hall's cubic transformation ("On the removal of skewness by transformation", J. R. Statist. Soc. B
54, 1992): with x = +-t / sqrt(C)

    bound = m - se * sqrt(C) * 3 / g * (cbrt(1 + g * (x - g / (6 C))) - 1)

which brings it to 4.2 % there, and to 2.8 instead of 3.8 % at 128 (`apps/bench/decision.py`).

Shape suffixes: G rollouts, C clusters, R scored tokens of one rollout.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

SYMMETRIC = 1e-9
"""Skewness under which there is nothing to correct."""


@lru_cache(maxsize=4096)
def t_quantile(confidence: float, degrees: int) -> float:
    """t such that Student's T with that many degrees of freedom has P(|T| <= t) = confidence.

    Inverts the closed form for whole degrees (Abramowitz and Stegun 26.7.3 and 26.7.4) by
    bisection, to about 1e-12. inf without degrees; ValueError unless 0 < confidence < 1.
    """
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    if degrees < 1:
        return math.inf
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        angle = (low + high) / 2
        if _t_central(angle, degrees) < confidence:
            low = angle
        else:
            high = angle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _t_central(angle: float, degrees: int) -> float:
    """P(|T| <= sqrt(degrees) * tan(angle))."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = total = cosine if odd else 1.0
    if degrees == 1:
        total = 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


@dataclass(frozen=True)
class ClusterMean:
    """Token mean with a clustered standard error (inf with fewer than two clusters)."""

    mean: float
    se: float
    clusters: int
    tokens: int
    skewness: float = 0.0
    """Of the clusters' residuals, third moment over the second's power of 3/2."""

    def interval(self, confidence: float) -> tuple[float, float]:
        """Confidence interval of the mean."""
        if not math.isfinite(self.se):
            return (-math.inf, math.inf)
        t = t_quantile(confidence, self.clusters - 1)
        return (self._bound(t), self._bound(-t))

    def _bound(self, t: float) -> float:
        if abs(self.skewness) < SYMMETRIC:
            return self.mean - t * self.se
        root = math.sqrt(self.clusters)
        shifted = t / root - self.skewness / (6 * self.clusters)
        moved = 3 / self.skewness * (math.cbrt(1 + self.skewness * shifted) - 1)
        return self.mean - self.se * root * moved


def cluster_mean(
    values_GR: Sequence[torch.Tensor],
    clusters_G: Sequence[Hashable] | None = None,
) -> ClusterMean:
    """Mean over all tokens of G rollouts of unequal length; rollouts without tokens are ignored.

    clusters_G: what each rollout belongs to, None: every rollout is a cluster of its own.
    """
    labels_G = range(len(values_GR)) if clusters_G is None else clusters_G
    sums: dict[Hashable, float] = {}
    counts: dict[Hashable, int] = {}
    for label, values_R in zip(labels_G, values_GR, strict=True):
        if values_R.numel() > 0:
            sums[label] = sums.get(label, 0.0) + float(values_R.detach().to(torch.float64).sum())
            counts[label] = counts.get(label, 0) + values_R.numel()
    if not counts:
        raise ValueError("no scored tokens: every rollout is empty")
    total, clusters = sum(counts.values()), len(counts)
    mean = sum(sums.values()) / total
    if clusters < 2 or not math.isfinite(mean):
        return ClusterMean(mean, math.inf, clusters, total)
    residuals = [sums[label] - mean * counts[label] for label in counts]
    largest = max(map(abs, residuals))
    if largest == 0.0:
        return ClusterMean(mean, 0.0, clusters, total)
    residuals = [residual / largest for residual in residuals]  # their cubes might overflow
    squares = math.fsum(residual**2 for residual in residuals)
    error = largest * math.sqrt(clusters / (clusters - 1) * squares) / total
    cubes = math.fsum(residual**3 for residual in residuals)
    return ClusterMean(mean, error, clusters, total, cubes / squares**1.5 * math.sqrt(clusters))
