"""From the merged statistics of a calibration to its ranges and schemes, and to an order in which
layers are demoted, on one replica.

The ranks of a tensor-parallel replica all search, since each measurement needs all of them. They
add in different orders, so their measurements may differ in the last digit, and a search that
parts leaves ranks waiting for each other for ever: all go by what rank 0 measured.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from forge_ptq.numerics.calibration import Calibration
from forge_ptq.numerics.divergence import rise
from forge_ptq.numerics.plan_model import ladder_of
from forge_ptq.numerics.planner import search
from forge_ptq.numerics.ranges import choose_range
from forge_ptq.numerics.sensitivity import FULL, Group, weight_error
from forge_ptq.numerics.stats import ActivationStats
from forge_ptq.services.ladder import BETTER, Move, overlaid
from forge_ptq.services.policy_copy import PolicyCopy, full
from forge_ptq.services.ranks import Ranks
from forge_ptq.services.work import Plan, PlanDone

log = logging.getLogger(__name__)

CLASSES = ("down_proj", "o_proj", "gate_proj", "q_proj")
"""First members of fused groups, the ones that quantization hurts most first: down_proj has massive
activations, o_proj writes into the residual stream as well."""


def choose_plan(
    policy: PolicyCopy,
    work: Plan,
    stats: Mapping[str, ActivationStats],
    step: Callable[[int], None],
    ranks: Ranks | None = None,
) -> PlanDone:
    """Ranges of every layer, and its scheme: the configured one, or what a search finds.

    stats: per site, of the input as it is served. step: called with the number of whole-model
    measurements done; may raise to stop. ranks: of the replica, if it has several; all of them
    call this. ValueError for mode auto without rollouts.
    """
    ranks = ranks or Ranks()
    absmax = {}
    for site, members in policy.sites.items():
        limit = choose_range(stats[site], work.method, percentile=work.percentile)
        absmax.update(dict.fromkeys(members, limit))
    if not work.auto:
        return PlanDone(dict(policy.layers), absmax, None)
    if not work.rollouts:
        raise ValueError("plan.mode auto: there are no rollouts to measure plans on")
    evaluator = policy.evaluator(work.rollouts, work.shift)
    done = 0

    def evaluate(layers: dict[str, str]) -> float:
        nonlocal done
        kl = torch.cat(evaluator.scores(layers, absmax).kl_GR).to(torch.float64)
        done += 1
        step(done)
        measured = rise(float(kl.mean())) if kl.numel() else math.nan
        return ranks.broadcast(measured)

    groups = ranks.broadcast(policy.groups(stats, absmax, work.shift, fixed(policy)))
    found = search(
        groups,
        evaluate,
        work.budget,
        max_evaluations=work.max_evaluations,
        start=work.start,
    )
    if not found.reached and ranks.rank == 0:
        log.warning(
            "no plan stays within a rise of %.2f %%; the best measures %.2f %%",
            100 * work.budget,
            100 * found.rise,
        )
    return PlanDone(found.layers, absmax, found.rise)


def rank_moves(
    policy: PolicyCopy, calibration: Calibration | None, overlay: Mapping[str, str]
) -> tuple[Move, ...]:
    """Every move of a fused group to its next better scheme, from the plan as overlaid, in the
    order in which demotions make them.

    With a calibration by ``ladder_of``: most error removed per cost first, from its statistics;
    where the step to dynamic would remove little, straight to bf16. Without, or where it saw no
    input, by class (``CLASSES``) and then by weight error. Layers that the user's overrides name
    are ranked like the others: an override says what a layer gets as long as the gate lets it
    pass. ptq.guard.on_reject without demote leaves all of them alone.
    """
    planned = policy.layers if calibration is None else calibration.layers
    schemes = overlaid(planned, overlay)
    elements = {name: math.prod(policy.shapes[f"{name}.weight"]) for name in schemes}
    total = sum(elements.values()) or 1
    sites = policy.sites
    ladder: list[tuple[str, str, str]] = []
    if calibration is not None and calibration.stats:
        groups = policy.groups(calibration.stats, calibration.absmax, calibration.shift, {})
        ladder = ladder_of([_from(group, schemes[group.name]) for group in groups])
    ranked = {site for site, _, _ in ladder}
    unseen = [site for site in sites if site not in ranked and schemes[site] != FULL]
    errors = {site: max(_error(policy, name) for name in sites[site]) for site in unseen}
    for site in sorted(unseen, key=lambda site: (_class(site), -errors[site])):
        while BETTER[scheme := schemes[site]] < BETTER[FULL]:
            schemes[site] = next(s for s, order in BETTER.items() if order == BETTER[scheme] + 1)
            ladder.append((site, scheme, schemes[site]))
    return tuple(
        Move(sites[site], old, new, sum(elements[name] for name in sites[site]) / total)
        for site, old, new in ladder
    )


def _from(group: Group, scheme: str) -> Group:
    """A group of which only this scheme and better ones are left; one that no statistics describe
    stays fixed."""
    errors = {s: error for s, error in group.error.items() if BETTER[s] >= BETTER[scheme]}
    return replace(group, error=errors)


def _class(site: str) -> int:
    leaf = site.rpartition(".")[2]
    return CLASSES.index(leaf) if leaf in CLASSES else len(CLASSES)


def _error(policy: PolicyCopy, name: str) -> float:
    return weight_error(full(policy.parameters[f"{name}.weight"]))


def fixed(policy: PolicyCopy) -> dict[str, str]:
    """Layers that the user's overrides name, with their schemes: the search leaves them alone."""
    patterns = policy.plan.overrides
    return {
        name: scheme
        for name, scheme in policy.layers.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
