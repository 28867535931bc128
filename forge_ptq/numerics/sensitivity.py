"""How much a scheme hurts one layer, as far as statistics of its input can tell.

The planner needs this only to rank groups *within* a class of layers; how much a class matters it
measures on the whole model. So errors are relative to the input's own size.

Layers that write into the residual stream (o and down) matter by what they add to it: their errors
are scaled by the power of their output relative to the power of the stream at that depth, which
is estimated as if all that was written before (the embedding first) were uncorrelated. Without it
the last down_proj of SmolLM2, whose output outweighs the rest of the stream, ranks in the middle.

Shape suffixes: B histogram bins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from forge_ptq.numerics.plan import sites_of
from forge_ptq.numerics.schemes.common import INT8_MAX
from forge_ptq.numerics.stats import ActivationStats, bin_edges

STATIC, DYNAMIC, FULL = "int8_static", "int8_dynamic", "bf16"

EMBEDDING = "embedding"

WRITERS = ("o_proj", "down_proj")
"""Leaf names of layers whose output is added to the residual stream."""

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
    """Expected relative error per scheme, comparable within a kind."""
    fixed: str | None = None
    """Scheme that the user demands."""


def _centres() -> torch.Tensor:
    edges_B = bin_edges()
    return (edges_B[:-1] * edges_B[1:]).sqrt()


def _quantile(stats: ActivationStats, share: float) -> float:
    """Centre of the bin below which (itself included) at least this share of elements lies."""
    count_B = stats.histogram_B.to("cpu", torch.float64)
    below_B = count_B.cumsum(0) / count_B.sum()
    return float(_centres()[min(int((below_B < share).sum()), len(count_B) - 1)])


def typical_square(stats: ActivationStats) -> float:
    """Mean of x^2 without the largest elements; 0 if nothing was seen."""
    count_B, x_B = stats.histogram_B.to("cpu", torch.float64), _centres()
    total = float(count_B.sum())
    if total == 0:
        return 0.0
    return float((count_B * x_B.square() * (x_B <= _quantile(stats, TYPICAL))).sum()) / total


def local_errors(stats: ActivationStats, range_: float) -> dict[str, float]:
    """Expected squared rounding error of a site's input relative to its typical mean square.

    From the histogram: an element below half a step becomes 0, one within the range is off by
    step^2 / 12 on average, one beyond it is clipped. The dynamic step is that of a typical token,
    whose largest of C elements is about the (1 - 1/C) quantile.
    """
    signal = typical_square(stats)
    if signal == 0 or range_ <= 0:
        return {STATIC: 0.0, DYNAMIC: 0.0, FULL: 0.0}
    count_B, x_B = stats.histogram_B.to("cpu", torch.float64), _centres()
    share_B = count_B / count_B.sum()

    def rounding(step: float) -> torch.Tensor:
        return torch.where(x_B < step / 2, x_B.square(), torch.full_like(x_B, step**2 / 12))

    typical_max = min(_quantile(stats, 1 - 1 / max(stats.channels, 2)), range_)
    static_B = rounding(range_ / INT8_MAX) + (x_B - range_).clamp(min=0).square()
    return {
        STATIC: float((share_B * static_B).sum()) / signal,
        DYNAMIC: float((share_B * rounding(typical_max / INT8_MAX)).sum()) / signal,
        FULL: 0.0,
    }


def weight_error(weight_NC: torch.Tensor) -> float:
    """Expected squared rounding error of an int8 weight relative to its typical column's power.

    ``sum_n s_n^2 / 12`` per column, over the median column's sum of squares: smoothing can leave
    one column so large that it takes all codes of every row. 0 for a weight mostly of zeros.
    """
    w_NC = weight_NC.detach().to(torch.float32)
    column = float(w_NC.square().sum(0).median())
    noise = float((w_NC.abs().amax(1) / INT8_MAX).square().sum()) / 12
    return noise / column if column > 0 else 0.0


def groups_of(
    layers: Iterable[str],
    shapes: Mapping[str, Sequence[int]],
    stats: Mapping[str, ActivationStats],
    ranges: Mapping[str, float],
    fixed: Mapping[str, str] | None = None,
    power: Mapping[str, float] | None = None,
    weight_errors: Mapping[str, float] | None = None,
) -> list[Group]:
    """The decisions to make in a model, in the order of its layers.

    layers: every linear that may be quantized. shapes: {parameter: shape}. stats: per site, of the
    input as it is served (smoothed). ranges: per layer. fixed: schemes the user demands, per layer.
    A site that was never seen cannot be static: its group is fixed as int8_dynamic.
    power: sum of squares per layer's weight as it is served, and of the embedding's mean row under
    EMBEDDING; without it errors are relative to the inputs alone. weight_errors: ``weight_error``
    of layers as they are served, to be added.
    """
    groups = []
    stream = (power or {}).get(EMBEDDING, 0.0)
    for site, members in sites_of(layers).items():
        wanted = {(fixed or {}).get(member) for member in members} - {None}
        seen = stats[site].tokens > 0 and ranges.get(site, 0.0) > 0
        kind, scale = site.rpartition(".")[2], 1.0
        if kind in WRITERS and power is not None:
            written = typical_square(stats[site]) * power[site]
            stream += written
            scale = written / stream if stream > 0 else 1.0
        errors = local_errors(stats[site], ranges.get(site, 0.0))
        added = max((weight_errors or {}).get(member, 0.0) for member in members)
        errors |= {scheme: errors[scheme] + added for scheme in (STATIC, DYNAMIC)}
        groups.append(
            Group(
                name=site,
                members=members,
                kind=kind,
                flops=float(sum(math.prod(shapes[f"{member}.weight"]) for member in members)),
                error={scheme: scale * error for scheme, error in errors.items()},
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
