"""Means of tokens that are not independent, and their errors.

Tokens of one rollout move together, and so do rollouts of one prompt. With s_C the sum and n_C the
number of tokens of each cluster, the mean is m = sum(s) / sum(n) and its variance
``C / (C - 1) * sum((s_c - m n_c)^2) / sum(n)^2`` (the ratio estimator's: Cochran, "Sampling
Techniques", 3rd edition, 1977, section 6.4). Intervals use Student's t with C - 1 degrees of
freedom.

Shape suffixes: G rollouts, C clusters, R scored tokens of one rollout.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch


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

    def interval(self, confidence: float) -> tuple[float, float]:
        """Confidence interval of the mean."""
        if not math.isfinite(self.se):
            return (-math.inf, math.inf)
        half = t_quantile(confidence, self.clusters - 1) * self.se
        return (self.mean - half, self.mean + half)


def cluster_mean(
    values_GR: Sequence[torch.Tensor], clusters_G: Sequence[Hashable] | None = None
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
    if clusters < 2:
        return ClusterMean(mean, math.inf, clusters, total)
    squares = sum((sums[label] - mean * counts[label]) ** 2 for label in counts)
    return ClusterMean(
        mean, math.sqrt(clusters / (clusters - 1) * squares) / total, clusters, total
    )
