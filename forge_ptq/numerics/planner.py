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
   group may skip the middle scheme (``ladder_of``). Its prefixes are plans from cheapest to bf16;
   bisection finds the shortest that measures within budget.
4. What the model got wrong is refined: groups are promoted again, as many at a time as the model
   says will fit, each time measured, halved when it did not fit.

A plan is only returned after it was measured within ``margin * budget``: the margin is for rollouts
that the search has not seen. If not even bf16 (and what the user fixed) measures within it, that is
returned with ``reached`` False.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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

COSTS: Mapping[str, float] = {STATIC: 1.0, DYNAMIC: 1.5, FULL: 2.0}
"""Cost per FLOP. int8 runs at twice the speed of bf16; a dynamic scale needs a pass over the tokens
that cannot fuse into the op before it, and engines without per-token kernels cannot serve it."""

BISECTION = 6
"""Evaluations that measuring the classes leaves over: enough to place a plan within 2 %."""

Choice = dict[str, str]
"""{group name: scheme}."""


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


def ladder_of(
    groups: Sequence[Group], costs: Mapping[str, float] = COSTS
) -> list[tuple[str, str, str]]:
    """Demotions (group, from, to), most error removed per cost first.

    Per group only the lower convex hull of (cost, error) counts, so a scheme that saves little
    error for its cost is skipped.
    """
    moves: list[tuple[float, float, str, str, str]] = []
    for group in groups:
        if group.fixed is not None:
            continue
        points = sorted((costs[s], error, s) for s, error in group.error.items() if s in costs)
        at = points[0]
        while True:
            steeper = [
                ((at[1] - p[1]) / (p[0] - at[0]), p)
                for p in points
                if p[0] > at[0] and p[1] < at[1]
            ]
            if not steeper:
                break
            slope, to = max(steeper, key=lambda entry: (entry[0], entry[1][0]))
            moves.append((-slope / group.flops, -group.error[at[2]], group.name, at[2], to[2]))
            at = to
        if at[2] != FULL:  # an error of zero still ends in bf16, last of all
            moves.append((0.0, 0.0, group.name, at[2], FULL))
    return [(name, old, new) for _, _, name, old, new in sorted(moves, key=lambda m: m[:2])]


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
    still fits, the search is only the refinement from there.
    """
    if max_evaluations < 3:
        raise ValueError(f"max_evaluations must be at least 3, got {max_evaluations}")
    run = _Search(groups, evaluate, margin * budget, max_evaluations, costs)
    cheapest = {g.name: g.fixed or min(costs, key=lambda s: costs[s]) for g in groups}
    if run.fits("cheapest", cheapest):
        return run.result(cheapest)
    best: Choice | None = None
    model = list(groups)
    if start is not None:
        warm = {g.name: g.fixed or start.get(g.members[0], FULL) for g in groups}
        best = warm if run.fits("start", warm) else None
    if best is None:
        model = run.calibrated()
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

    # -- step 2 --

    def calibrated(self) -> list[Group]:
        """The groups with errors in units of the measured log-rise.

        Too few evaluations left to measure classes and bisect afterwards: the groups as they are.
        """
        free = [group for group in self.groups if group.fixed is None]
        kinds = sorted({group.kind for group in free})
        bisection = min(BISECTION, math.ceil(math.log2(2 * len(free) + 1)) + 1)
        if self.left < len(kinds) + 2 + bisection:
            return list(self.groups)
        background = {g.name: g.fixed or FULL for g in self.groups}
        base = 0.0
        if any(group.fixed not in (None, FULL) for group in self.groups):
            base = math.log1p(self.measure("fixed", background))

        def log_rise(step: str, names: Iterable[str], scheme: str) -> float:
            rise = self.measure(step, background | dict.fromkeys(names, scheme))
            return max(math.log1p(min(rise, 1e6)) - base, 0.0)

        blocks: list[tuple[float, list[Group]]] = []
        for kind in kinds:
            members = [group for group in free if group.kind == kind]
            names = [group.name for group in members]
            blocks.append((log_rise(f"{kind} static", names, STATIC), members))
        for _ in range(2):
            if self.left <= bisection + 2:
                break
            blocks.sort(key=lambda block: -block[0])
            whole, members = blocks[0]
            ranked = sorted(members, key=lambda group: -group.error[STATIC])
            cut = max(1, len(ranked) // 5)
            if len(ranked) < 2 or whole <= 0:
                break
            rest = log_rise(
                f"{ranked[0].kind} static without {cut}", [g.name for g in ranked[cut:]], STATIC
            )
            rest = min(rest, whole)
            blocks[:1] = [(whole - rest, ranked[:cut]), (rest, ranked[cut:])]
        static = _shared_out(blocks, STATIC)
        dynamic = dict.fromkeys(static, 0.0)
        names = [group.name for group in free]
        total = log_rise("all dynamic", names, DYNAMIC) if DYNAMIC in self.costs else 0.0
        # A group's dynamic error, in the units its static error came out in.
        units = {
            g.name: static[g.name] * g.error[DYNAMIC] / g.error[STATIC] if g.error[STATIC] else 0.0
            for g in free
        }
        scale = total / sum(units.values()) if sum(units.values()) > 0 else 0.0
        dynamic = {name: unit * scale for name, unit in units.items()}
        return [
            g
            if g.fixed is not None
            else replace(g, error={STATIC: static[g.name], DYNAMIC: dynamic[g.name], FULL: 0.0})
            for g in self.groups
        ]

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


def _shared_out(blocks: Sequence[tuple[float, list[Group]]], scheme: str) -> dict[str, float]:
    """Each block's measured log-rise in proportion to its groups' local errors."""
    shares: dict[str, float] = {}
    for measured, members in blocks:
        total = sum(group.error[scheme] for group in members)
        for group in members:
            part = group.error[scheme] / total if total > 0 else 1 / len(members)
            shares[group.name] = measured * part
    return shares
