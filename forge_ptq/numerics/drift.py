"""Whether the activations still look like those that the live scales were calibrated on.

Three numbers per site, all from statistics that a forward pass collects on the way:

- ``clipped_fraction``: share of |x| above the range, from the histogram (bins cut by the range
  count in proportion);
- ``js_distance``: Jensen-Shannon distance of the two histograms: the square root of the divergence
  to base 2, a metric in [0, 1]; it also sees a distribution that shrinks;
- ``absmax_ratio``: largest |x| now over largest |x| then.

Base statistics merged by ``median`` or ``weighted_mean`` have a lowered absmax, that of the range.
It says nothing of the largest |x| then, which only the histogram still bounds: see ``largest``.

Statistics of few tokens scatter: an absmax over fewer tokens is smaller, and the distance of two
samples of n elements in k occupied bins has a bias of about sqrt(k / (4 n ln 2)).

Shape suffixes: B bins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from forge_ptq.numerics.stats import BINS, ActivationStats, bin_edges


@dataclass(frozen=True)
class Drift:
    """How far one site, or the worst of several, has moved."""

    clipped_fraction: float = 0.0
    js_distance: float = 0.0
    absmax_ratio: float = 1.0


@dataclass(frozen=True)
class Thresholds:
    """What is tolerated; exceeding any of them calls for a calibration."""

    max_clipped_fraction: float
    max_js_distance: float
    max_absmax_ratio: float


def largest(stats: ActivationStats) -> float:
    """Largest |x| that was seen: absmax, or the upper edge of the last occupied bin if absmax was
    lowered below that bin. 0.0 if there was nothing, the largest fp32 for the bin open upwards.
    """
    occupied = stats.histogram_B.nonzero()
    if not len(occupied):
        return 0.0
    top = int(occupied.max())
    edges_B = bin_edges()
    if top == 0 or stats.absmax >= float(edges_B[top]):
        return stats.absmax
    return float(edges_B[top + 1]) if top < BINS - 1 else torch.finfo(torch.float32).max


def clipped_fraction(stats: ActivationStats, limit: float) -> float:
    """Share of elements with |x| > limit, in [0, 1]; 0.0 if there are none or limit is 0."""
    count = stats.count
    if not count or limit <= 0 or limit >= (bound := largest(stats)):
        return 0.0
    edges_B = bin_edges()
    edges_B[0] = 0.0
    # No element lies above the bound, which also closes the bin that is open upwards.
    top = int(stats.histogram_B.nonzero().max())
    edges_B[top + 1] = bound
    left_B, right_B = edges_B[: top + 1], edges_B[1 : top + 2]
    width_B = (right_B - left_B).clamp(min=1e-300)
    above_B = ((right_B - limit) / width_B).clamp(0.0, 1.0)
    above_B[left_B > limit] = 1.0
    return float((stats.histogram_B[: top + 1].to(torch.float64) * above_B).sum()) / count


def js_distance(a_B: torch.Tensor, b_B: torch.Tensor) -> float:
    """Jensen-Shannon distance, base 2, of two histograms; 0.0 if either is empty."""
    if not int(a_B.sum()) or not int(b_B.sum()):
        return 0.0
    p_B, q_B = a_B.to(torch.float64) / a_B.sum(), b_B.to(torch.float64) / b_B.sum()
    m_B = (p_B + q_B) / 2

    def half(x_B: torch.Tensor) -> float:
        return float(torch.where(x_B > 0, x_B * (x_B / m_B).log2(), 0.0).nansum()) / 2

    return math.sqrt(min(max(half(p_B) + half(q_B), 0.0), 1.0))


def drift(now: ActivationStats, base: ActivationStats, limit: float) -> Drift:
    """One site's drift; limit is the range of the live scale (0 if the site has none).

    A site that either saw nothing has not drifted. One that was all zeros then and is not now has
    an infinite absmax_ratio.
    """
    if not now.tokens or not base.tokens:
        return Drift()
    clipped = clipped_fraction(now, limit)
    return Drift(clipped, js_distance(now.histogram_B, base.histogram_B), _ratio(now, base))


def _ratio(now: ActivationStats, base: ActivationStats) -> float:
    then = largest(base)
    if then > 0:
        return largest(now) / then
    return math.inf if largest(now) > 0 else 1.0


def worst(drifts: Mapping[str, Drift]) -> Drift:
    """The largest of each number over all sites; no drift if there is none."""
    values = list(drifts.values())
    if not values:
        return Drift()
    return Drift(
        max(value.clipped_fraction for value in values),
        max(value.js_distance for value in values),
        max(value.absmax_ratio for value in values),
    )


def exceeded(drifts: Mapping[str, Drift], thresholds: Thresholds) -> str | None:
    """Which site drifted too far and by what, or None.

    Of several, the one furthest beyond its threshold (relative to it).
    """
    names = ("clipped_fraction", "js_distance", "absmax_ratio")
    found: list[tuple[float, str]] = []
    for site, value in drifts.items():
        for name in names:
            number, limit = getattr(value, name), getattr(thresholds, f"max_{name}")
            if number > limit:
                excess = number / limit if limit else math.inf
                found.append((excess, f"{site}: {name} {number:.3g} exceeds {limit:g}"))
    return max(found)[1] if found else None
