"""What each step of quantizing the activations costs: a table of perplexity rise per recipe.

Usage: python -m apps.bench.ladder --model models/smollm2_135m --data rollouts.jsonl
       [--out docs/results/ladder_smollm2.json] [--only REGEX ...]

Rollouts (as `apps.bench.rollouts` writes them: the model's own responses at temperature 1) are
split by prompt into three sets: one calibrates, one decides plans, one is held out and gives the
numbers of the table. Quantization is simulated with the served integers (policy_evaluate); every
row is the relative rise in perplexity, exp(mean KL) - 1, with its 95 % interval clustered by
rollout. Rows are written as they are measured; a second call with the same settings measures only
those that are missing.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from apps.bench.ladder_data import read, split
from apps.bench.options import write
from forge_ptq.models.checkpoint import iter_tensors
from forge_ptq.numerics.divergence import compare
from forge_ptq.numerics.plan import QuantPlan
from forge_ptq.numerics.planner import (
    COSTS,
    DYNAMIC,
    FULL,
    STATIC,
    Group,
    PlanResult,
    flop_shares,
    groups_of,
    search,
)
from forge_ptq.numerics.ranges import choose_range
from forge_ptq.numerics.smoothing import log2_factors
from forge_ptq.numerics.stats import ActivationStats
from forge_ptq.services.policy_batches import make_batches, shortened
from forge_ptq.services.policy_copy import PolicyCopy, build_model
from forge_ptq.services.policy_evaluate import Evaluator
from forge_ptq.services.policy_quantize import full

Shift = Mapping[str, torch.Tensor]
Stats = Mapping[str, ActivationStats]


PLAN_OPTIONS = ("plan_limit", "plan_tokens", "margin", "max_evaluations")
"""Options that decide rows with a plan; each such row holds its own under "plan_settings"."""

NOT_DECISIVE = frozenset({"out", "only", "threads", *PLAN_OPTIONS})
"""Options that leave the other rows of an earlier call valid."""


@dataclass(frozen=True)
class Recipe:
    """One row: schemes, ranges and smoothing factors."""

    layers: dict[str, str]
    ranges: dict[str, float]
    shift: Shift
    notes: dict[str, Any]


class Ladder:
    """The policy, statistics of its inputs, and the rows measured so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.policy = PolicyCopy(build_model(options.model), QuantPlan.from_config(DYNAMIC))
        self.policy.load(0, dict(iter_tensors(Path(options.model))))
        # Little padding, and activations that stay in the cache.
        self.policy.batch_tokens = options.batch_tokens
        calibration, plan, self.held_out = split(
            read(options.data, self.policy.model.config),
            options.calibrate,
            options.plan,
            options.held_out,
        )
        self.batches = make_batches(calibration, options.batch_tokens)
        self.plan_rollouts = shortened(plan[: options.plan_limit], options.plan_tokens)
        self.tokens = {
            "calibration": sum(len(r.token_ids) for r in calibration),
            "plan_scored": sum(len(r.token_ids) - r.response_start for r in self.plan_rollouts),
            "held_out_scored": sum(len(r.token_ids) - r.response_start for r in self.held_out),
        }
        self.hidden: dict[str, list[torch.Tensor]] = {}
        self.seen: dict[str, dict[str, ActivationStats]] = {}
        self._evaluator: tuple[str, Shift, Evaluator] | None = None
        self.rows: dict[str, Any] = {}

    # -- statistics and smoothing --

    def stats(self, key: str, shift: Shift | None = None) -> dict[str, ActivationStats]:
        """Statistics of the calibration rollouts under smoothing factors; kept by key."""
        if key not in self.seen:
            self.seen[key] = self.policy.observe(self.batches, shift)
        return self.seen[key]

    def smooth(self, alpha: float | None, *, down: bool = False) -> Shift:
        """Power-of-two factors from the raw statistics."""
        return self.policy.smooth(self.stats("raw"), alpha, down_proj=down)[0]

    def smooth_unrounded(self, alpha: float) -> Shift:
        """The factors that SmoothQuant itself would take."""
        shifts = {}
        for name, site in self.policy.smoothing_sites().items():
            weights = [full(self.policy.parameters[f"{m}.weight"]) for m in site.members]
            amax_C = torch.stack([w_NC.abs().amax(0) for w_NC in weights]).amax(0)
            absmax_C = self.stats("raw")[name].absmax_C
            log_P = log2_factors(site.reduce(absmax_C), site.reduce(amax_C), alpha)
            shifts[name] = site.expand(log_P)
        return shifts

    def absmax(self, shift: Shift) -> dict[str, float]:
        """Ranges by absmax; smoothing moves the raw statistics' channels, no pass needed."""
        ranges = {}
        for site, members in self.policy.sites.items():
            absmax_C = self.stats("raw")[site].absmax_C
            if site in shift:
                absmax_C = absmax_C * torch.exp2(-shift[site].float())
            ranges.update(dict.fromkeys(members, float(absmax_C.max())))
        return ranges

    def ranges(self, stats: Stats, method: str) -> dict[str, float]:
        """Ranges of every layer from its site's statistics."""
        percentile = self.options.percentile
        chosen = {site: choose_range(stats[site], method, percentile=percentile) for site in stats}
        return {m: chosen[s] for s, members in self.policy.sites.items() for m in members}

    # -- plans --

    def plan_settings(self) -> dict[str, Any]:
        """What a plan found now would depend on, besides what all rows depend on."""
        return {name: getattr(self.options, name) for name in PLAN_OPTIONS}

    def groups(self, stats: Stats, ranges: dict[str, float], shift: Shift | None) -> list[Group]:
        """Decisions of the planner. shift None: errors relative to the inputs alone."""
        if shift is None:
            return groups_of(self.policy.layers, self.policy.shapes, stats, ranges)
        return self.policy.groups(stats, ranges, shift)

    def uniform(self, default: str, **leaves: str) -> dict[str, str]:
        """One scheme, except for layers with these leaf names."""
        return {n: leaves.get(n.rpartition(".")[2], default) for n in self.policy.layers}

    def worst(self, groups: list[Group], kind: str, count: int) -> dict[str, str]:
        """All static but the groups of one kind with the largest local errors."""
        ranked = sorted((g for g in groups if g.kind == kind), key=lambda g: -g.error[STATIC])
        spared = {member for group in ranked[:count] for member in group.members}
        return {name: FULL if name in spared else STATIC for name in self.policy.layers}

    def plan(
        self,
        budget: float,
        stats: Stats,
        ranges: dict[str, float],
        shift: Shift,
        costs: Mapping[str, float] = COSTS,
    ) -> PlanResult:
        """Search on the plan rollouts."""
        evaluator = self.evaluator("plan", shift)

        def evaluate(layers: dict[str, str]) -> float:
            scores = evaluator.scores(layers, ranges)
            return compare(scores.logprobs_GR, scores.reference_GR, scores.kl_GR).perplexity_rise

        return search(
            self.groups(stats, ranges, shift),
            evaluate,
            budget,
            margin=self.options.margin,
            max_evaluations=self.options.max_evaluations,
            costs=costs,
        )

    # -- measuring --

    def evaluator(self, which: str, shift: Shift) -> Evaluator:
        """For "plan" or "held_out" rollouts; codes are kept as long as the factors are the same."""
        kept = self._evaluator
        if kept is None or kept[0] != which or not _same(kept[1], shift):
            rollouts = self.plan_rollouts if which == "plan" else self.held_out
            if which not in self.hidden:
                self.hidden[which] = self.policy.reference(rollouts)
            made = self.policy.evaluator(rollouts, shift, self.hidden[which])
            kept = self._evaluator = (which, shift, made)
        return kept[2]

    def measure(self, recipe: Recipe) -> dict[str, Any]:
        """The row of a recipe."""
        start = time.monotonic()
        scores = self.evaluator("held_out", recipe.shift).scores(recipe.layers, recipe.ranges)
        result = compare(scores.logprobs_GR, scores.reference_GR, scores.kl_GR)
        groups = self.groups(self.stats("raw"), recipe.ranges, None)
        shares = flop_shares(groups, {g.name: recipe.layers[g.members[0]] for g in groups})
        return {
            "rise": result.perplexity_rise,
            "ci95": list(result.ci),
            "kl": result.kl,
            "nll_rise": result.nll_perplexity_rise,
            "worst_rollout_rise": result.worst_sequence_rise,
            "shares": shares,
            "seconds": round(time.monotonic() - start, 1),
            **recipe.notes,
        }

    def run(self, rows: Mapping[str, Callable[[Ladder], Recipe]]) -> None:
        """Measure the rows that are asked for and missing; write after each."""
        options = argparse.Namespace(**{**vars(self.options), "data": self.options.data.name})
        if options.out.exists():
            before = json.loads(options.out.read_text())
            if _asked(before["settings"]) == _asked(vars(options)):
                self.rows = before["rows"]
        wanted = [n for only in options.only for n in rows if re.search(only, n)]
        for name in dict.fromkeys(wanted):
            if name in self.rows and self._holds(self.rows[name]):
                continue
            self.rows[name] = self.measure(rows[name](self))
            ordered = {n: self.rows[n] for n in [*rows, *self.rows] if n in self.rows}
            write(options, {"tokens": self.tokens, "rows": ordered}, quiet=True)
            print(line(name, self.rows[name]), flush=True)

    def _holds(self, row: Mapping[str, Any]) -> bool:
        """Whether a row of an earlier call is what would be measured now."""
        return "plan_rise" not in row or row.get("plan_settings") == self.plan_settings()


def _same(one: Shift, other: Shift) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def _asked(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings that decide what a row's numbers are."""
    chosen = {k: str(v) for k, v in settings.items() if k not in NOT_DECISIVE}
    return {**chosen, "model": Path(chosen["model"]).name}


def line(name: str, row: Mapping[str, Any]) -> str:
    """A row for people: rise, interval, KL, NLL rise, worst rollout, shares."""
    low, high = row["ci95"]
    shares = "/".join(f"{100 * row['shares'][s]:.0f}" for s in (STATIC, DYNAMIC, FULL))
    return (
        f"{name:44} {shares:>9} {100 * row['rise']:7.2f} % [{100 * low:.2f}, {100 * high:.2f}]  "
        f"KL {row['kl']:.4f}  NLL {100 * row['nll_rise']:.2f} %  "
        f"worst {100 * row['worst_rollout_rise']:.1f} %"
    )


def main(arguments: list[str] | None = None) -> None:
    """Parse options, measure, write."""
    from apps.bench.ladder_rows import ROWS

    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--model", required=True, help="local HF checkpoint")
    options.add_argument("--data", type=Path, required=True, help="rollouts, JSON lines")
    options.add_argument("--out", type=Path, default=Path("docs/results/ladder_smollm2.json"))
    options.add_argument(
        "--only", nargs="+", default=[""], metavar="REGEX", help="rows to measure, in this order"
    )
    options.add_argument("--calibrate", type=int, default=40, help="rollouts that calibrate")
    options.add_argument("--plan", type=int, default=20, help="rollouts that decide plans")
    options.add_argument("--plan-limit", type=int, default=12, help="of them that are used")
    options.add_argument("--plan-tokens", type=int, default=24, help="of each of their responses")
    options.add_argument("--held-out", type=int, default=20, help="rollouts of the table")
    options.add_argument("--batch-tokens", type=int, default=1024)
    options.add_argument("--percentile", type=float, default=99.99)
    options.add_argument("--margin", type=float, default=0.9, help="of the budget, for plans")
    options.add_argument("--max-evaluations", type=int, default=24)
    options.add_argument("--threads", type=int, default=1)
    parsed = options.parse_args(arguments)
    torch.set_num_threads(parsed.threads)
    Ladder(parsed).run(ROWS)


if __name__ == "__main__":
    main()
