"""The rows of the ladder: one function per recipe, in the order of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from apps.bench.ladder import Ladder, Recipe
from forge_ptq.numerics.names import RANGE_METHODS
from forge_ptq.numerics.planner import DYNAMIC, FULL, STATIC

ALPHAS = (0.5, 0.65, 0.8, 0.9)
DOWN = "down_proj"


def dynamic(ladder: Ladder) -> Recipe:
    """Everything per token, no smoothing."""
    return Recipe(ladder.uniform(DYNAMIC), {}, {}, {})


def static(ladder: Ladder, method: str) -> Recipe:
    """Everything static, no smoothing."""
    return Recipe(ladder.uniform(STATIC), ladder.ranges(ladder.stats("raw"), method), {}, {})


def plain_down(ladder: Ladder, down: str) -> Recipe:
    """Static but for down_proj, no smoothing."""
    ranges = ladder.absmax({})
    return Recipe(ladder.uniform(STATIC, down_proj=down), ranges, {}, {})


def smoothed(
    ladder: Ladder,
    alpha: float | None,
    default: str,
    down: str | None = None,
    method: str = "absmax",
    unrounded: bool = False,
) -> Recipe:
    """SmoothQuant, then one scheme, and perhaps another for down_proj."""
    shift = ladder.smooth_unrounded(alpha or 0.8) if unrounded else ladder.smooth(alpha)
    ranges = ladder.absmax(shift)
    if method != "absmax":
        stats = ladder.stats(f"smooth {alpha} False", shift)
        chosen = ladder.ranges(stats, method)
        ranges = {n: chosen[n] if DOWN not in n else r for n, r in ranges.items()}
    leaves = {DOWN: down} if down else {}
    notes: dict[str, Any] = {}
    if alpha is None:
        alphas = list(ladder.policy.smooth(ladder.stats("raw"), None)[1].values())
        notes = {"alphas": {str(a): alphas.count(a) for a in sorted(set(alphas))}}
    return Recipe(ladder.uniform(default, **leaves), ranges, shift, notes)


def planned(
    ladder: Ladder, budget: float, *, down: bool = True, costs: Mapping[str, float] | None = None
) -> Recipe:
    """SmoothQuant as calibrations do it (alpha per layer), of down_proj too or not; the planner."""
    shift = ladder.smooth(None, down=down)
    stats = ladder.stats(f"smooth None {down}", shift)
    ranges = ladder.absmax(shift)
    result = ladder.plan(budget, stats, ranges, shift, **({"costs": costs} if costs else {}))
    notes = {
        "plan_settings": ladder.plan_settings(),
        "plan_rise": result.rise,
        "plan_tokens": ladder.tokens["plan_scored"],
        "reached": result.reached,
        "not_static": {n: s for n, s in result.layers.items() if s != STATIC},
        "measurements": [
            [m.step, m.rise, round(m.shares[STATIC], 4), round(m.shares[FULL], 4)]
            for m in result.measurements
        ],
    }
    return Recipe(result.layers, ranges, shift, notes)


def spared(
    ladder: Ladder,
    count: int,
    *,
    down_alpha: float | None = 0.0,
    widen: float = 1.0,
    method: str = "absmax",
    without_first: bool = False,
    by_input: bool = False,
) -> Recipe:
    """Everything static but the ``count`` down_proj with the largest local errors, in bf16.

    down_alpha: smooth the other down_proj through up's rows (None: alpha chosen per layer). widen:
    factor on down_proj's ranges. method: of down_proj's ranges. without_first: down_proj's ranges
    as if position 0 were not there. by_input: rank by errors relative to the inputs alone.
    """
    shift = dict(ladder.smooth(0.8))
    raw = ladder.stats("raw")
    ranges = ladder.absmax(shift)
    groups = ladder.groups(raw, ladder.absmax({}), None if by_input else {})
    layers = ladder.worst(groups, DOWN, count)
    if down_alpha != 0.0:
        both = ladder.policy.smooth(raw, down_alpha, down_proj=True)[0]
        shift |= {n: s for n, s in both.items() if DOWN in n and layers[n] == STATIC}
        ranges = ladder.absmax(shift)
    stats = {n: s for n, s in raw.items() if DOWN in n}
    if method != "absmax":
        assert down_alpha == 0.0
        ranges |= {n: r for n, r in ladder.ranges(stats, method).items() if DOWN in n}
    if without_first:
        ranges |= {n: r for n, r in _without_first(ladder).items() if DOWN in n}
    ranges = {n: r * widen if DOWN in n else r for n, r in ranges.items()}
    return Recipe(layers, ranges, shift, {"bf16": [n for n, s in layers.items() if s == FULL]})


def _without_first(ladder: Ladder) -> dict[str, float]:
    """Absmax of down_proj's inputs over all positions but the first of each sequence."""
    seen: dict[str, float] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x_BTC = args[0][:, 1:].abs()
            seen[name] = max(seen.get(name, 0.0), float(x_BTC.max()))

        return hook

    hooks = [
        ladder.policy.model.get_submodule(name).register_forward_pre_hook(watch(name))
        for name in ladder.policy.layers
        if DOWN in name
    ]
    try:
        # One sequence a batch: padding would be looked at.
        ladder.policy.observe([[rollout] for batch in ladder.batches for rollout in batch])
    finally:
        for hook in hooks:
            hook.remove()
    return seen


STATIC_OR_FULL = {STATIC: 1.0, FULL: 2.0}

ROWS: dict[str, Callable[[Ladder], Recipe]] = {
    "dynamic": dynamic,
    **{f"static {m}": partial(static, method=m) for m in RANGE_METHODS},
    "static, down dynamic": partial(plain_down, down=DYNAMIC),
    "static, down bf16": partial(plain_down, down=FULL),
    **{
        f"smooth {a}: static, down bf16": partial(smoothed, alpha=a, default=STATIC, down=FULL)
        for a in ALPHAS
    },
    "smooth 0.8 unrounded: static, down bf16": partial(
        smoothed, alpha=0.8, default=STATIC, down=FULL, unrounded=True
    ),
    "smooth per layer: static, down bf16": partial(smoothed, alpha=None, default=STATIC, down=FULL),
    "smooth per layer: static, down dynamic": partial(
        smoothed, alpha=None, default=STATIC, down=DYNAMIC
    ),
    "smooth 0.8: static, down dynamic": partial(smoothed, alpha=0.8, default=STATIC, down=DYNAMIC),
    "smooth 0.8: dynamic": partial(smoothed, alpha=0.8, default=DYNAMIC),
    "smooth per layer: dynamic": partial(smoothed, alpha=None, default=DYNAMIC),
    "smooth 0.8: static": partial(smoothed, alpha=0.8, default=STATIC),
    **{
        f"smooth 0.8 {m}: static, down bf16": partial(
            smoothed, alpha=0.8, default=STATIC, down=FULL, method=m
        )
        for m in RANGE_METHODS[1:]
    },
    **{f"smooth 0.8: static, {n} down bf16": partial(spared, count=n) for n in (3, 6, 9, 12, 15)},
    "smooth 0.8: static, 9 down bf16, ranked by input alone": partial(
        spared, count=9, by_input=True
    ),
    "smooth 0.8 and down 0.5: static, 9 down bf16": partial(spared, count=9, down_alpha=0.5),
    "smooth 0.8 and down per layer: static, 9 down bf16": partial(spared, count=9, down_alpha=None),
    "smooth 0.8: static, 9 down bf16, others x1.5": partial(spared, count=9, widen=1.5),
    "smooth 0.8: static, 9 down bf16, others mse": partial(spared, count=9, method="mse"),
    "smooth 0.8: static, 9 down bf16, others p99.99": partial(spared, count=9, method="percentile"),
    "smooth 0.8: static, 9 down bf16, position 0 left out": partial(
        spared, count=9, without_first=True
    ),
    "smooth 0.8: static, 3 down bf16, position 0 left out": partial(
        spared, count=3, without_first=True
    ),
    "plan 3 %": partial(planned, budget=0.03),
    "plan 1 %": partial(planned, budget=0.01),
    "plan 3 %, static or bf16": partial(planned, budget=0.03, costs=STATIC_OR_FULL),
    "plan 1 %, static or bf16": partial(planned, budget=0.01, costs=STATIC_OR_FULL),
    "plan 3 %, down not smoothed": partial(planned, budget=0.03, down=False),
}
