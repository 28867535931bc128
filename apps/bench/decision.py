"""How often the gate errs: its decision simulated on real per-token scores.

Usage: python -m apps.bench.decision --scores scores.pt [--grouped several_per_prompt.pt]
       [--out docs/results/decision.json]

A candidate's rise over the whole pool of rollouts (`apps.bench.decision_scores`) is taken for the
truth, and the pool for the population: probe sets are drawn from it with replacement, looked at as
a publish looks at them, and judged by `services.guard.decide` itself. Four tables:

coverage   how often an interval misses the truth, by method and size
looks      at a candidate exactly at the limit, how often an interval decides at any of the looks,
           with and without widening it for their number
operating  share accepted against the true rise in units of the limit (the limit is moved, so that
           every candidate's scores serve at every distance), by probe sizes and estimator
candidates every candidate against the gate of 3 %, and how its worst rollout and the 99th
           percentile of its tokens' KL are distributed
prompts    (with --grouped) the mean's standard error with rollouts for clusters, and with prompts
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from apps.bench.decision_draws import METHODS, Draws, Scored
from apps.bench.options import write
from forge_ptq.numerics.clusters import cluster_mean
from forge_ptq.numerics.divergence import rise
from forge_ptq.services.guard import Evidence, Limits, StagedSlot, decide, looks

SIZES = (8, 16, 32, 64, 128)
RULES = ((8, 8), (16, 16), (20, 20), (32, 32), (64, 64), (128, 128), (16, 128), (32, 128))
"""(sequences, max_sequences) of a probe."""

RATIOS = (0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
"""True rise in units of the limit."""

LAYERS = {"layer": "int8_dynamic"}
STAGED = [StagedSlot("candidate", True, LAYERS)]


def outcomes(
    draws: Draws, limits: Limits, sizes: Sequence[int], method: str = "kl"
) -> Counter[str]:
    """What becomes of every drawn probe set; "rollouts", "tokens": all that were scored."""
    counts: Counter[str] = Counter()
    for trial in range(draws.trials):
        for number, size in enumerate(sizes):
            divergence = draws.divergence(trial, size, method)
            evidence = Evidence("candidate", LAYERS, STAGED, divergence)
            decision = decide(evidence, limits, more=number + 1 < len(sizes))
            if not decision.undecided:
                break
        counts["accepted" if decision.accepted else "refused"] += 1
        counts["by point estimate"] += "point estimate" in decision.reason
        counts["rollouts"] += size
        counts["tokens"] += divergence.tokens
    return counts


def shares(counts: Counter[str], trials: int) -> dict[str, float]:
    """Shares of the trials, and the mean numbers of rollouts and tokens."""
    names = ("accepted", "refused", "by point estimate", "rollouts", "tokens")
    return {name: round(counts[name] / trials, 4) for name in names}


def coverage(pools: Sequence[Draws]) -> list[dict[str, Any]]:
    """Misses of the 95 % interval: over the truth (a harmful candidate looks harmless if the
    interval lies *under* it)."""
    rows = []
    for method in METHODS:
        for size in SIZES:
            under = over = width = 0.0
            for draws in pools:
                truth = draws.scored.truth
                for trial in range(draws.trials):
                    low, high = draws.divergence(trial, size, method).interval(0.95)
                    under += high < truth
                    over += low > truth
                    width += (high - low) / 2 / truth
            total = sum(draws.trials for draws in pools)
            rows.append(
                {
                    "method": method,
                    "rollouts": size,
                    "under": round(under / total, 4),
                    "over": round(over / total, 4),
                    "half_width_in_rises": round(width / total, 4),
                }
            )
    return rows


def inflation(pools: Sequence[Draws]) -> list[dict[str, Any]]:
    """At the limit: decided by an interval, though no side is right."""
    rows = []
    for (first, most), method in product(RULES, ("kl", "kl, symmetric")):
        sizes = looks(first, most)
        for widened in (False, True):
            total: Counter[str] = Counter()
            for draws in pools:
                limit = draws.scored.truth
                confidence = Limits(looks=len(sizes) if widened else 1).look_confidence
                for trial in range(draws.trials):
                    for size in sizes:
                        low, high = draws.divergence(trial, size, method).interval(confidence)
                        if high < limit or low > limit:
                            total["accepted" if high < limit else "refused"] += 1
                            break
            trials = sum(draws.trials for draws in pools)
            rows.append(
                {
                    "method": method,
                    "looks": sizes,
                    "widened": widened,
                    "accepted": round(total["accepted"] / trials, 4),
                    "refused": round(total["refused"] / trials, 4),
                }
            )
    return rows


def operating(pools: Sequence[Draws]) -> list[dict[str, Any]]:
    """Share accepted by true rise; the mean over the candidates, and the worst of them."""
    rows = []
    for method in ("kl", "kl, by token", "nll"):
        for first, most in RULES if method == "kl" else RULES[-1:]:
            sizes = looks(first, most)
            for ratio in RATIOS:
                each = []
                for draws in pools:
                    limits = Limits(draws.scored.truth / ratio, looks=len(sizes))
                    counts = outcomes(draws, limits, sizes, method)
                    each.append(shares(counts, draws.trials))
                wrong = "accepted" if ratio > 1 else "refused"
                rows.append(
                    {
                        "method": method,
                        "looks": sizes,
                        "true_rise_over_limit": ratio,
                        "accepted": _mean(each, "accepted"),
                        "wrong_for_the_worst_candidate": max(row[wrong] for row in each),
                        "by point estimate": _mean(each, "by point estimate"),
                        "rollouts": _mean(each, "rollouts"),
                        "tokens": round(_mean(each, "tokens")),
                    }
                )
    return rows


def _mean(rows: Sequence[dict[str, float]], name: str) -> float:
    return round(sum(row[name] for row in rows) / len(rows), 4)


def candidates(pools: Sequence[Draws], options: argparse.Namespace) -> dict[str, Any]:
    """Every candidate at the gate as configured, and under the gate of the mean alone."""
    rows = {}
    sizes = looks(options.first, options.most)
    limits = Limits(options.limit, looks=len(sizes))
    for draws in pools:
        one = draws.scored
        last = [draws.divergence(t, options.most, "kl") for t in range(draws.trials)]
        worst = torch.tensor([d.worst_sequence_rise for d in last], dtype=torch.float64)
        token_kl = torch.tensor([d.token_kl or math.nan for d in last], dtype=torch.float64)
        with_gates = replace(
            limits, max_worst_rise=options.worst_rise, max_token_kl=options.token_kl
        )
        rows[one.name.strip()] = {
            "rise": one.truth,
            "nll_rise": rise(one.nll_mean),
            "worst_rollout_rise": rise(max(one.means())),
            "worst_of_a_probe": _quantiles(worst),
            "token_kl": _quantiles(token_kl),
            "kl": shares(outcomes(draws, with_gates, sizes, "kl"), options.trials),
            "kl_mean_gate_alone": shares(outcomes(draws, limits, sizes, "kl"), options.trials),
            "nll": shares(outcomes(draws, limits, sizes, "nll"), options.trials),
        }
    return rows


def prompts(scored: Sequence[Scored]) -> dict[str, Any]:
    """By candidate: standard errors of the whole pool's mean KL, relative to that mean."""
    rows = {}
    for one in scored:
        by_rollout = cluster_mean(one.kl_GR)
        by_prompt = cluster_mean(one.kl_GR, one.groups_G)
        rows[one.name.strip()] = {
            "rollouts": by_rollout.clusters,
            "prompts": by_prompt.clusters,
            "relative_error_by_rollout": round(by_rollout.se / by_rollout.mean, 4),
            "relative_error_by_prompt": round(by_prompt.se / by_prompt.mean, 4),
        }
    return rows


def _quantiles(values: torch.Tensor) -> dict[str, float]:
    return {str(q): round(float(values.quantile(q)), 4) for q in (0.5, 0.99)}


def main(arguments: list[str] | None = None) -> None:
    """Parse options, simulate, write."""
    from forge_ptq.config import PTQConfig

    cfg = PTQConfig()
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--scores", type=Path, required=True)
    options.add_argument("--grouped", type=Path, help="scores with several rollouts per prompt")
    options.add_argument("--out", type=Path, default=Path("docs/results/decision.json"))
    options.add_argument("--trials", type=int, default=500, help="probe sets per candidate")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--limit", type=float, default=cfg.guard.max_perplexity_rise)
    options.add_argument("--first", type=int, default=cfg.probe.sequences)
    options.add_argument("--most", type=int, default=cfg.probe.max_sequences)
    options.add_argument("--worst-rise", type=float, default=cfg.guard.max_worst_rise)
    options.add_argument("--token-kl", type=float, default=cfg.guard.max_token_kl)
    parsed = options.parse_args(arguments)
    scored = Scored.load(parsed.scores)
    pools = [
        Draws(one, parsed.trials, max(SIZES), parsed.seed + number)
        for number, one in enumerate(scored)
    ]
    # Shapes of scores near a gate, not those of a wreck, say how it errs there.
    near = [draws for draws in pools if draws.scored.truth < 10 * parsed.limit]
    results = {
        "pool": {
            "rollouts": len(scored[0].kl_GR),
            "tokens": scored[0].tokens,
            **scored[0].settings,
        },
        "coverage": coverage(near),
        "looks": inflation(near),
        "operating": operating(near),
        "candidates": candidates(pools, parsed),
    }
    if parsed.grouped is not None:
        results["prompts"] = prompts(Scored.load(parsed.grouped))
        parsed.grouped = parsed.grouped.name
    parsed.scores = parsed.scores.name
    write(parsed, results, quiet=True)


if __name__ == "__main__":
    main()
