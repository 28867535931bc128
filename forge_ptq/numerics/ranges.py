"""The range of a static scale, the |x| that maps to code 127, from merged statistics alone.

``absmax``      nothing clips.
``percentile``  clips the given share of elements.
``mse``         least expected squared error of the quantizer.
``kl``          least divergence between the values before and after, as TensorRT calibrates
                (S. Migacz, "8-bit inference with TensorRT", 2017).

All see the log histogram as a density that is constant within a bin, on [0, absmax]; its last
occupied bin ends at absmax, its first one begins at 0. Candidates lie 16 to an octave below absmax.

**mse.** With step ``s = r / 127`` and ``n(x) = min(round(x / s), 127)``, the integral of the
squared error from 0 to x is ``F(x) = n s^3 / 12 + (x - n s)^3 / 3``: n whole periods of s^3 / 12
and the rest. It holds below the first level, where an element costs x^2, and, with n stuck at 127,
beyond the range, where it costs (x - r)^2. So a bin's expected cost is (F(right) - F(left)) /
width, exactly.

**kl.** TensorRT compares 2048 uniform bins with the same bins merged into 128 levels. Bins that are
logarithmic do not nest in levels, so both are cut at each other's edges. P is the density within
the range, all clipped mass added to the last level; Q keeps a level's mass but spreads it evenly
over the level's occupied part, and knows nothing of what was clipped. The first bin is left out:
zeros are exact under every scale.

Shape suffixes: B bins, R candidate ranges, K pieces between cuts, V levels.
"""

from __future__ import annotations

import math

import torch

from forge_ptq.numerics.names import RANGE_METHODS
from forge_ptq.numerics.schemes.common import INT8_MAX
from forge_ptq.numerics.stats import ActivationStats, bin_edges

CANDIDATES_PER_OCTAVE = 16
OCTAVES = 12
"""How far below absmax a range is looked for."""


def choose_range(stats: ActivationStats, method: str, *, percentile: float = 99.99) -> float:
    """The |x| that code 127 stands for; 0.0 if there was no token or only zeros, else > 0.

    percentile: of |x|, in (0, 100], for the method of that name.
    ValueError for an unknown method or a percentile out of bounds.
    """
    if method not in RANGE_METHODS:
        raise ValueError(f"range method {method!r}; expected one of {', '.join(RANGE_METHODS)}")
    absmax = stats.absmax
    if absmax == 0.0 or method == "absmax":
        return absmax
    if method == "percentile":
        return quantile(stats, percentile / 100)
    edges_B, mass_B = density(stats)
    steps = torch.arange(OCTAVES * CANDIDATES_PER_OCTAVE + 1, dtype=torch.float64)
    ranges_R = absmax * torch.exp2(-steps / CANDIDATES_PER_OCTAVE)
    cost = expected_error if method == "mse" else divergence
    return float(ranges_R[cost(edges_B, mass_B, ranges_R).argmin()])


def density(stats: ActivationStats) -> tuple[torch.Tensor, torch.Tensor]:
    """(edges [n + 1], mass [n]) fp64 up to the last occupied bin: from 0 to absmax, sums to 1."""
    edges = bin_edges()
    last = int(stats.histogram_B.nonzero().max())
    edges_B = edges[: last + 2].clone()
    edges_B[0] = 0.0
    # absmax may be the bin's very edge; a bin needs some width to have a density.
    edges_B[-1] = max(stats.absmax, float(edges_B[-2]) * (1 + 1e-9))
    mass_B = stats.histogram_B[: last + 1].to(torch.float64)
    return edges_B, mass_B / mass_B.sum()


def quantile(stats: ActivationStats, share: float) -> float:
    """The |x| that this share of the elements stays below; absmax if it is lost in the first bin.

    ValueError unless 0 < share <= 1 and something was seen.
    """
    if not 0 < share <= 1:
        raise ValueError(f"a percentile must be in (0, 100], got {share * 100:g}")
    edges_B, mass_B = density(stats)
    upto_B = mass_B.cumsum(0)
    index = min(int((upto_B < share - 1e-15).sum()), len(mass_B) - 1)
    if index == 0:
        return stats.absmax
    inside = (share - float(upto_B[index] - mass_B[index])) / float(mass_B[index])
    left, right = edges_B[index : index + 2].tolist()
    return min(left + min(max(inside, 0.0), 1.0) * (right - left), stats.absmax)


def expected_error(
    edges_B: torch.Tensor, mass_B: torch.Tensor, ranges_R: torch.Tensor
) -> torch.Tensor:
    """Mean squared error [R] of symmetric quantization with each range, of a ``density``."""
    step_R1 = ranges_R[:, None] / INT8_MAX
    level_RB = (edges_B / step_R1).round().clamp(max=INT8_MAX)
    integral_RB = level_RB * step_R1**3 / 12 + (edges_B - level_RB * step_R1) ** 3 / 3
    return (integral_RB.diff(dim=1) * (mass_B / edges_B.diff())).sum(1)


def divergence(edges_B: torch.Tensor, mass_B: torch.Tensor, ranges_R: torch.Tensor) -> torch.Tensor:
    """KL(P || Q) [R] of each range, of a ``density``; inf where a range leaves nothing to compare.

    The last level may hold clipped mass but nothing of its own; Q then gets a floor of 1e-9.
    """
    rows = len(ranges_R)
    height_B = mass_B / edges_B.diff()
    height_B = torch.cat([height_B.new_zeros(1), height_B[1:], height_B.new_zeros(1)])
    step_R1 = ranges_R[:, None] / INT8_MAX
    cuts_RV = (torch.arange(INT8_MAX, dtype=torch.float64) + 0.5) * step_R1
    cuts_RK = torch.cat([edges_B.expand(rows, -1), cuts_RV, ranges_R[:, None]], dim=1)
    cuts_RK = cuts_RK.minimum(ranges_R[:, None]).sort(dim=1).values
    width_RK = cuts_RK.diff(dim=1)
    middle_RK = (cuts_RK[:, 1:] + cuts_RK[:, :-1]) / 2
    bins_RK = torch.searchsorted(edges_B, middle_RK, right=True) - 1
    levels_RK = (middle_RK / step_R1).round().clamp(max=INT8_MAX).to(torch.int64)
    inside_RK = height_B[bins_RK.clamp(0, len(height_B) - 1)] * width_RK

    def per_level(values_RK: torch.Tensor) -> torch.Tensor:
        zeros_RV = torch.zeros(rows, INT8_MAX + 1, dtype=torch.float64)
        return zeros_RV.scatter_add(1, levels_RK, values_RK)

    occupied_RK = torch.where(inside_RK > 0, width_RK, 0.0)
    spread_RV = per_level(inside_RK) / per_level(occupied_RK).clamp(min=1e-300)
    q_RK = spread_RV.gather(1, levels_RK) * occupied_RK
    kept_R1 = inside_RK.sum(1, keepdim=True)
    clipped_R1 = (mass_B[1:].sum() - kept_R1).clamp(min=0)
    # Clipped elements become the top level; they go where that level has its mass, else its width.
    last_RK = levels_RK == INT8_MAX
    share_RK = torch.where(last_RK, torch.where(inside_RK > 0, inside_RK, 0.0), 0.0)
    empty_R1 = share_RK.sum(1, keepdim=True) == 0
    share_RK = torch.where(empty_R1 & last_RK, width_RK, share_RK)
    share_RK = share_RK / share_RK.sum(1, keepdim=True).clamp(min=1e-300)
    p_RK = (inside_RK + share_RK * clipped_R1) / mass_B[1:].sum().clamp(min=1e-300)
    q_RK = (q_RK / kept_R1.clamp(min=1e-300)).clamp(min=1e-9 / math.sqrt(INT8_MAX))
    terms_RK = torch.where(p_RK > 0, p_RK * (p_RK.clamp(min=1e-300) / q_RK).log(), 0.0)
    return torch.where(kept_R1[:, 0] > 0, terms_RK.sum(1), math.inf)
