"""How much a scheme hurts one layer, as far as statistics of its input can tell.

The planner needs this only to rank groups *within* a class of layers; how much a class matters it
measures on the whole model. So errors are relative to the input's own size, and what rounding does
to the weights, the same under both int8 schemes, is left out.

Shape suffixes: B histogram bins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from forge_ptq.numerics.plan import sites_of
from forge_ptq.numerics.stats import ActivationStats, bin_edges

STATIC, DYNAMIC, FULL = "int8_static", "int8_dynamic", "bf16"

TYPICAL = 0.999
"""Share of elements that make up the typical signal: massive activations would drown the rest."""


@dataclass(frozen=True)
class Group:
    """Layers that must be decided together: the readers of one input."""

    name: str
    members: tuple[str, ...]
    kind: str
    """Class of the layer: its leaf name."""
    flops: float
    """Multiplications per token."""
    error: Mapping[str, float]
    """Relative error of the input per scheme, see ``local_errors``."""
    fixed: str | None = None
    """Scheme that the user demands."""


def local_errors(stats: ActivationStats, range_: float) -> dict[str, float]:
    """Expected squared rounding error of a site's input relative to its typical mean square.

    From the histogram: an element below half a step becomes 0, one within the range is off by
    step^2 / 12 on average, one beyond it is clipped. The dynamic step is that of a typical token,
    whose largest of C elements is about the (1 - 1/C) quantile.
    """
    edges_B = bin_edges()
    x_B = (edges_B[:-1] * edges_B[1:]).sqrt()
    count_B = stats.histogram_B.to("cpu", torch.float64)
    total = float(count_B.sum())
    if total == 0 or range_ <= 0:
        return {STATIC: 0.0, DYNAMIC: 0.0, FULL: 0.0}
    below_B = count_B.cumsum(0) / total

    def quantile(share: float) -> float:
        return float(x_B[min(int((below_B < share).sum()), len(x_B) - 1)])

    signal = float((count_B * x_B.square() * (x_B <= quantile(TYPICAL))).sum())

    def noise(limit: float) -> float:
        step = limit / 127
        rounding_B = torch.where(x_B < step / 2, x_B.square(), torch.tensor(step**2 / 12))
        clipping_B = (x_B - limit).clamp(min=0).square()
        return float((count_B * (rounding_B + clipping_B)).sum()) / max(signal, 1e-300)

    typical_max = max(quantile(1 - 1 / max(stats.channels, 2)), 1e-300)
    step = min(typical_max, range_) / 127
    dynamic_B = torch.where(x_B < step / 2, x_B.square(), torch.tensor(step**2 / 12))
    dynamic = float((count_B * dynamic_B).sum()) / max(signal, 1e-300)
    return {STATIC: noise(range_), DYNAMIC: dynamic, FULL: 0.0}


def groups_of(
    layers: Iterable[str],
    shapes: Mapping[str, Sequence[int]],
    stats: Mapping[str, ActivationStats],
    ranges: Mapping[str, float],
    fixed: Mapping[str, str] | None = None,
) -> list[Group]:
    """The decisions to make in a model.

    layers: every linear that may be quantized. shapes: {parameter: shape}. stats: per site, of the
    input as it is served (smoothed). ranges: per layer. fixed: schemes the user demands, per layer.
    A site that was never seen cannot be static: its group is fixed as int8_dynamic.
    """
    groups = []
    for site, members in sites_of(layers).items():
        wanted = {(fixed or {}).get(member) for member in members} - {None}
        seen = stats[site].tokens > 0 and ranges.get(site, 0.0) > 0
        groups.append(
            Group(
                name=site,
                members=members,
                kind=site.rpartition(".")[2],
                flops=float(sum(math.prod(shapes[f"{member}.weight"]) for member in members)),
                error=local_errors(stats[site], ranges.get(site, 0.0)),
                fixed=next(iter(wanted)) if wanted else (None if seen else DYNAMIC),
            )
        )
    return groups


def flop_shares(groups: Sequence[Group], choice: Mapping[str, str]) -> dict[str, float]:
    """Share of the groups' FLOPs per scheme."""
    total = sum(group.flops for group in groups) or 1.0
    shares = dict.fromkeys((STATIC, DYNAMIC, FULL), 0.0)
    for group in groups:
        shares[choice[group.name]] += group.flops / total
    return shares
