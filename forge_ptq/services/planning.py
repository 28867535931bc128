"""From the merged statistics of a calibration to its ranges and schemes, on one replica.

The ranks of a tensor-parallel replica all search, since each measurement needs all of them. They
add in different orders, so their measurements may differ in the last digit, and a search that
parts leaves ranks waiting for each other for ever: all go by what rank 0 measured.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import torch

from forge_ptq.numerics.divergence import rise
from forge_ptq.numerics.planner import search
from forge_ptq.numerics.ranges import choose_range
from forge_ptq.numerics.stats import ActivationStats
from forge_ptq.services.policy_copy import PolicyCopy
from forge_ptq.services.ranks import Ranks
from forge_ptq.services.work import Plan, PlanDone

log = logging.getLogger(__name__)


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


def fixed(policy: PolicyCopy) -> dict[str, str]:
    """Layers that the user's overrides name, with their schemes: the search leaves them alone."""
    patterns = policy.plan.overrides
    return {
        name: scheme
        for name, scheme in policy.layers.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
