"""Which layer can afford which scheme: the cheapest plan within a perplexity budget.

Ranked by class and local error, decided by whole-model measurement. A single layer's effect on
perplexity, measured on a few hundred tokens, is noise; the effect of a whole class of layers (all
down_proj, say) or of a complete plan is not. So the search measures only such:

1. Everything at the cheapest scheme. Within budget: done.
2. Each class alone at the cheapest scheme, the rest in bf16, and everything at the next one. The
   class that hurts most is measured again without its worst groups, twice. A class' measured
   log-rise is shared out among its groups in proportion to their local errors. Log-rise is KL, and
   the KL of small independent errors adds up.
3. That additive model gives an order of demotions, most error removed per cost first, in which a
   group may skip the middle scheme. Its prefixes are plans from cheapest to bf16;
   bisection finds the shortest that measures within budget.
4. What the model got wrong is refined: groups are promoted again, as many at a time as the model
   says will fit, each time measured, halved when it did not fit.

A plan is only returned after it was measured within ``margin * budget``: the margin is for rollouts
that the search has not seen. If not even bf16 (and what the user fixed) measures within it, that is
returned with ``reached`` False. Step 2 and the order of step 3 are in ``plan_model``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from forge_ptq.numerics.plan_model import COSTS, Choice, fitted, ladder_of
from forge_ptq.numerics.sensitivity import (
    DYNAMIC,
    FULL,
    STATIC,
    Group,
    flop_shares,
    groups_of,
    local_errors,
)

__all__ = [
    "COSTS",
    "DYNAMIC",
    "FULL",
    "STATIC",
    "Group",
    "Measurement",
    "PlanResult",
    "flop_shares",
    "groups_of",
    "ladder_of",
    "local_errors",
    "search",
]


@dataclass(frozen=True)
class Measurement:
    """One whole-model evaluation."""

    step: str
    rise: float
    shares: Mapping[str, float]
    """FLOP share per scheme."""


@dataclass(frozen=True)
class PlanResult:
    """The plan found."""

    layers: dict[str, str]
    """Scheme of every member of every group."""
    rise: float
    """Measured perplexity rise of this plan."""
    reached: bool
    """Whether it is within margin * budget."""
    shares: Mapping[str, float]
    measurements: tuple[Measurement, ...] = field(default=())


def search(
    groups: Sequence[Group],
    evaluate: Callable[[dict[str, str]], float],
    budget: float,
    *,
    margin: float = 0.9,
    max_evaluations: int = 24,
    start: Mapping[str, str] | None = None,
    costs: Mapping[str, float] = COSTS,
) -> PlanResult:
    """The cheapest plan found whose measured rise is at most margin * budget.

    evaluate: {layer: scheme} -> relative perplexity rise (0.03 is 3 %) of the whole model; not
    finite counts as over any budget. start: a plan to try first, of the calibration before; if it
    still fits, the search is only the refinement from there, or nothing at all where too few
    evaluations are left to measure the classes: local errors alone compare only within a class.
    """
    if max_evaluations < 3:
        raise ValueError(f"max_evaluations must be at least 3, got {max_evaluations}")
    run = _Search(groups, evaluate, margin * budget, max_evaluations, costs)
    cheapest = {g.name: g.fixed or min(costs, key=lambda s: costs[s]) for g in groups}
    if run.fits("cheapest", cheapest):
        return run.result(cheapest)
    best: Choice | None = None
    if start is not None:
        warm = {g.name: g.fixed or start.get(g.members[0], FULL) for g in groups}
        best = warm if run.fits("start", warm) else None
    model = fitted(groups, run.measure, lambda: run.left, costs)
    if model is None and best is not None:
        return run.result(best)
    model = model or list(groups)
    if best is None:
        best = run.bisect(cheapest, ladder_of(model, costs))
    if best is None:
        return run.result({g.name: g.fixed or FULL for g in groups})
    return run.result(run.refine(best, model))


class _Search:
    """State of one search: what was measured, and how many evaluations are left."""

    def __init__(
        self,
        groups: Sequence[Group],
        evaluate: Callable[[dict[str, str]], float],
        target: float,
        max_evaluations: int,
        costs: Mapping[str, float],
    ) -> None:
        self.groups = groups
        self.by_name = {group.name: group for group in groups}
        self.evaluate, self.target, self.costs = evaluate, target, costs
        self.left = max_evaluations
        self.log: list[Measurement] = []
        self.known: dict[tuple[str, ...], float] = {}

    def layers(self, choice: Choice) -> dict[str, str]:
        return {member: choice[g.name] for g in self.groups for member in g.members}

    def measure(self, step: str, choice: Choice) -> float:
        """Rise of a plan; measured once."""
        key = tuple(choice[group.name] for group in self.groups)
        if key not in self.known:
            rise = float(self.evaluate(self.layers(choice)))
            self.known[key] = rise if math.isfinite(rise) else math.inf
            self.left -= 1
            self.log.append(Measurement(step, self.known[key], flop_shares(self.groups, choice)))
        return self.known[key]

    def fits(self, step: str, choice: Choice) -> bool:
        return self.measure(step, choice) <= self.target

    def result(self, choice: Choice) -> PlanResult:
        rise = self.measure("result", choice)
        return PlanResult(
            layers=self.layers(choice),
            rise=rise,
            reached=rise <= self.target,
            shares=flop_shares(self.groups, choice),
            measurements=tuple(self.log),
        )

    # -- step 3 --

    def bisect(self, cheapest: Choice, ladder: Sequence[tuple[str, str, str]]) -> Choice | None:
        """The plan after the shortest prefix of the ladder that fits; None if nothing does."""

        def after(length: int) -> Choice:
            return cheapest | {name: new for name, _, new in ladder[:length]}

        low, high, sure = 0, len(ladder), False
        while high - low > 1 and self.left > (0 if sure else 1):
            middle = (low + high) // 2
            if self.fits(f"prefix {middle} of {len(ladder)}", after(middle)):
                high, sure = middle, True
            else:
                low = middle
        return after(high) if sure or self.fits("all bf16", after(high)) else None

    # -- step 4 --

    def refine(self, choice: Choice, model: Sequence[Group]) -> Choice:
        """Promote groups again as long as the measured rise stays within the target."""
        errors = {group.name: group.error for group in model}
        refused: set[tuple[str, str]] = set()
        limit = len(self.groups)
        while self.left > 0:
            rise = math.log1p(self.measure("refine", choice))
            predicted = sum(errors[name][scheme] for name, scheme in choice.items())
            scale = rise / predicted if predicted > 0 and rise > 0 else 1.0
            slack = math.log1p(self.target) - rise
            moves = self._promotions(choice, errors, refused)
            picked: Choice = {}
            for added, name, scheme in moves:
                if name in picked or len(picked) == limit:
                    continue
                if picked and added * scale > slack:
                    break
                picked[name] = scheme
                slack -= added * scale
            if not picked:
                break
            if self.fits(f"promote {len(picked)}", choice | picked):
                choice = choice | picked
            elif len(picked) == 1:
                refused |= set(picked.items())
            else:
                limit = max(1, len(picked) // 2)
        return choice

    def _promotions(
        self,
        choice: Choice,
        errors: Mapping[str, Mapping[str, float]],
        refused: set[tuple[str, str]],
    ) -> list[tuple[float, str, str]]:
        """(error added, group, cheaper scheme), least error per cost saved first."""
        moves = []
        for name, now in choice.items():
            group = self.by_name[name]
            for scheme, cost in self.costs.items():
                saved = (self.costs[now] - cost) * group.flops
                if group.fixed is None and saved > 0 and (name, scheme) not in refused:
                    added = max(errors[name][scheme] - errors[name][now], 0.0)
                    moves.append((added / saved, added, name, scheme))
        return [(added, name, scheme) for _, added, name, scheme in sorted(moves)]
