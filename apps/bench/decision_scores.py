"""Per-token scores of candidates good, bad and in between, for `apps.bench.decision`.

Usage: python -m apps.bench.decision_scores --model models/smollm2_135m --data rollouts.jsonl
       --out scores.pt [--only REGEX ...] [--pool-data several_per_prompt.jsonl]

Rollouts (as `apps.bench.rollouts` writes them) are split by prompt: some calibrate, some decide the
plan that the planner makes, the others are the pool that every candidate is scored on, unless the
pool has a file of its own. Quantization is
simulated with the served integers. The file is written after every candidate; a second call scores
those that are missing. docs/results/decision.json rests on four files of rollouts, one after the
other: --count 80 --max-prompt 224 --max-tokens 48 --seed 4, 5, 6 and 7, and on --pool 192; its
table of prompts on --count 24 --responses 6 --seed 8.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from apps.bench.ladder import Ladder, Recipe
from apps.bench.ladder_data import read
from apps.bench.ladder_rows import DOWN, dynamic, planned, smoothed, static
from forge_ptq.numerics.divergence import compare
from forge_ptq.numerics.planner import DYNAMIC, FULL, STATIC
from forge_ptq.services.policy_evaluate import Evaluator, FakeQuantizedLinear, Scores

CODES_OF_4_BITS = 7
"""Largest 4-bit code."""

CLIPPED = 16
"""Layer of the candidate whose harm shows in few tokens."""


@dataclass(frozen=True)
class Damage:
    """What is wrong with one layer: its weight scales times a factor, or its codes at 4 bits."""

    layer: str
    factor: float = 1.0
    four_bits: bool = False

    def apply(self, linear: FakeQuantizedLinear) -> None:
        """Harm the stand-in of the layer."""
        linear.scale_N = linear.scale_N * self.factor
        if self.four_bits:
            step = 127 / CODES_OF_4_BITS
            linear.codes_NK = (linear.codes_NK.to(torch.float32) / step).round() * step


class DamagedEvaluator(Evaluator):
    """An Evaluator one of whose layers is harmed."""

    damage: Damage | None = None

    def _linear(self, name: str, module: Any, absmax: float | None) -> FakeQuantizedLinear:
        linear = super()._linear(name, module, absmax)
        if self.damage is not None and self.damage.layer == name:
            self.damage.apply(linear)
        return linear


@dataclass(frozen=True)
class Candidate:
    """A recipe, and what is then wrong with it."""

    recipe: Callable[[Ladder], Recipe]
    damage: Damage | None = None


def mlp(number: int, leaf: str) -> str:
    """Name of a layer of the MLP."""
    return f"model.layers.{number}.mlp.{leaf}"


GOOD = partial(smoothed, alpha=None, default=STATIC, down=DYNAMIC)
"""What configs/smollm2_135m_cpu.yaml serves."""


def clipped(ladder: Ladder) -> Recipe:
    """GOOD with one down_proj static, its range half of what it was calibrated to be."""
    good, name = GOOD(ladder), mlp(CLIPPED, DOWN)
    layers = {**good.layers, name: STATIC}
    return Recipe(layers, {**good.ranges, name: good.ranges[name] / 2}, good.shift, {})


def harmed(number: int, leaf: str, factor: float = 1.0, *, four_bits: bool = False) -> Candidate:
    """GOOD with one layer harmed."""
    return Candidate(GOOD, Damage(mlp(number, leaf), factor, four_bits))


CANDIDATES: dict[str, Candidate] = {
    "smooth: static, down bf16": Candidate(
        partial(smoothed, alpha=None, default=STATIC, down=FULL)
    ),
    "smooth: static, down dynamic": Candidate(GOOD),
    "  layer 2 up_proj x1.1": harmed(2, "up_proj", 1.1),
    "  layer 14 gate_proj x1.2": harmed(14, "gate_proj", 1.2),
    "  layer 2 up_proj at 4 bits": harmed(2, "up_proj", four_bits=True),
    "plan 3 %": Candidate(partial(planned, budget=0.03)),
    "dynamic": Candidate(dynamic),
    "  layer 2 gate_proj x1.2": harmed(2, "gate_proj", 1.2),
    "  layer 14 gate_proj x1.3": harmed(14, "gate_proj", 1.3),
    "  layer 2 up_proj x1.3": harmed(2, "up_proj", 1.3),
    f"  layer {CLIPPED} down_proj static, clipped": Candidate(clipped),
    "naive static": Candidate(partial(static, method="absmax")),
}
"""Indented: the one before them that is not, with one layer harmed."""


class Pool:
    """The pool's rollouts, the reference's states of them, and what has been scored."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ladder = Ladder(options)
        self.rollouts = self.ladder.held_out
        if options.pool_data is not None:
            self.rollouts = read(options.pool_data, self.ladder.policy.model.config)
        self.hidden = self.ladder.policy.reference(self.rollouts)
        self._evaluators: list[tuple[Any, DamagedEvaluator]] = []
        self.scored: dict[str, Any] = {}
        if options.out.exists():
            self.scored = torch.load(options.out)["candidates"]

    def evaluator(self, recipe: Recipe) -> DamagedEvaluator:
        """One per smoothing; codes are kept."""
        for shift, made in self._evaluators:
            if shift.keys() == recipe.shift.keys() and all(
                torch.equal(shift[name], recipe.shift[name]) for name in shift
            ):
                return made
        made = DamagedEvaluator(self.ladder.policy, self.rollouts, recipe.shift, self.hidden)
        self._evaluators.append((recipe.shift, made))
        return made

    def score(self, name: str, candidate: Candidate) -> Scores:
        """Score one candidate on the whole pool and write."""
        recipe = candidate.recipe(self.ladder)
        evaluator = self.evaluator(recipe)
        evaluator.damage = candidate.damage
        scores = evaluator.scores(recipe.layers, recipe.ranges)
        self.scored[name] = {"kl": scores.kl_GR, "logprobs": scores.logprobs_GR}
        shared = {
            "reference": scores.reference_GR,
            "groups": [r.group for r in self.rollouts],
            "settings": {
                "model": Path(self.options.model).name,
                "data": self.options.data.name,
                "calibrate": self.options.calibrate,
                "plan": self.options.plan,
            },
        }
        torch.save({"candidates": self.scored, **shared}, self.options.out)
        return scores


def settings(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of this command, with what Ladder needs besides."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--model", required=True, help="local HF checkpoint")
    options.add_argument("--data", type=Path, required=True, help="rollouts, JSON lines")
    options.add_argument("--out", type=Path, required=True, help="scores, written by torch.save")
    options.add_argument("--pool-data", type=Path, help="rollouts of the pool, JSON lines")
    options.add_argument("--only", nargs="+", default=[""], metavar="REGEX")
    options.add_argument("--calibrate", type=int, default=40, help="rollouts that calibrate")
    options.add_argument("--plan", type=int, default=20, help="rollouts that decide the plan")
    options.add_argument("--pool", type=int, default=160, help="rollouts that are scored")
    options.add_argument("--batch-tokens", type=int, default=1024)
    options.add_argument("--threads", type=int, default=1)
    parsed = options.parse_args(arguments)
    # The rest is what apps.bench.ladder takes when it is told nothing.
    parsed.held_out, parsed.plan_limit, parsed.plan_tokens = parsed.pool, 12, 24
    parsed.percentile, parsed.margin, parsed.max_evaluations = 99.99, 0.9, 24
    return parsed


def main(arguments: list[str] | None = None) -> None:
    """Parse options, score, write."""
    options = settings(arguments)
    torch.set_num_threads(options.threads)
    pool = Pool(options)
    wanted = [n for only in options.only for n in CANDIDATES if re.search(only, n)]
    for name in dict.fromkeys(wanted):
        if name not in pool.scored:
            scores = pool.score(name, CANDIDATES[name])
            result = compare(scores.logprobs_GR, scores.reference_GR, scores.kl_GR)
            print(f"{name:44} {result.perplexity_rise:.2%}", flush=True)


if __name__ == "__main__":
    main()
