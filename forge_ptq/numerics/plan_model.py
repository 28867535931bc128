"""What a plan's whole-model error is made of: a number per group and scheme, which add up.

Steps 2 and 3 of the plan search (``planner``): ``fitted`` turns local errors, which are comparable
within a class of layers only, into shares of measured log-rises, and ``ladder_of`` orders the
demotions of a set of groups by what they gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from forge_ptq.numerics.sensitivity import DYNAMIC, FULL, STATIC, Group

COSTS: Mapping[str, float] = {STATIC: 1.0, DYNAMIC: 1.5, FULL: 2.0}
"""Cost per FLOP. int8 runs at twice the speed of bf16; a dynamic scale needs a pass over the tokens
that cannot fuse into the op before it, and engines without per-token kernels cannot serve it."""

BISECTION = 6
"""Evaluations that measuring the classes leaves over: enough to place a plan within 2 %."""

Choice = dict[str, str]
"""{group name: scheme}."""


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


def fitted(
    groups: Sequence[Group],
    measure: Callable[[str, Choice], float],
    left: Callable[[], int],
    costs: Mapping[str, float] = COSTS,
) -> list[Group] | None:
    """The groups with errors in units of the measured log-rise.

    measure: (what for, plan) -> rise; left: how many more of them there may be. None, without
    measuring anything, if these are too few to measure classes and to search afterwards.
    """
    free = [group for group in groups if group.fixed is None]
    kinds = sorted({group.kind for group in free})
    bisection = min(BISECTION, math.ceil(math.log2(2 * len(free) + 1)) + 1)
    if left() < len(kinds) + 2 + bisection:
        return None
    background = {g.name: g.fixed or FULL for g in groups}
    base = 0.0
    if any(group.fixed not in (None, FULL) for group in groups):
        base = math.log1p(measure("fixed", background))

    def log_rise(step: str, names: Iterable[str], scheme: str) -> float:
        rise = measure(step, background | dict.fromkeys(names, scheme))
        return max(math.log1p(min(rise, 1e6)) - base, 0.0)

    blocks: list[tuple[float, list[Group]]] = []
    for kind in kinds:
        members = [group for group in free if group.kind == kind]
        names = [group.name for group in members]
        blocks.append((log_rise(f"{kind} static", names, STATIC), members))
    for _ in range(2):
        if left() <= bisection + 2:
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
    names = [group.name for group in free]
    total = log_rise("all dynamic", names, DYNAMIC) if DYNAMIC in costs else 0.0
    # A group's dynamic error, in the units its static error came out in.
    units = {
        g.name: static[g.name] * g.error[DYNAMIC] / g.error[STATIC] if g.error[STATIC] else 0.0
        for g in free
    }
    scale = total / sum(units.values()) if sum(units.values()) > 0 else 0.0
    return [
        g
        if g.fixed is not None
        else replace(g, error={STATIC: static[g.name], DYNAMIC: units[g.name] * scale, FULL: 0.0})
        for g in groups
    ]


def _shared_out(blocks: Sequence[tuple[float, list[Group]]], scheme: str) -> dict[str, float]:
    """Each block's measured log-rise in proportion to its groups' local errors."""
    shares: dict[str, float] = {}
    for measured, members in blocks:
        total = sum(group.error[scheme] for group in members)
        for group in members:
            part = group.error[scheme] / total if total > 0 else 1 / len(members)
            shares[group.name] = measured * part
    return shares
