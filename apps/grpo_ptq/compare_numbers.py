"""From the summaries of a comparison's runs to its numbers.

Bands are 95 % intervals of Student's t over the seeds: they say how far another set of seeds might
come out, nothing of other tasks or models. Arms are compared with the reference seed by seed, since
runs of one seed share their questions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_ptq.numerics.clusters import t_quantile
from forge_ptq.observe.summary import is_number, mean

CURVES = ("reward", "mismatch_k3", "ess", "left_out", "policy_age_mean")
"""Of every training step. `left_out`: share of the tokens that masks and vetoes took."""

WINDOW = 10
"""Steps that share a row of the reference curves."""

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Run:
    """What one run says; of one that failed, as far as it came."""

    arm: str
    seed: int
    completed: bool
    error: str
    """Why not, if it was not completed."""
    steps: int
    reward: float | None
    """Mean of the last ten steps; a completed run has one."""
    curves: dict[str, list[float | None]]
    """Each of CURVES by training step, from step 1 on."""
    rises: dict[int, float]
    """Perplexity rise of the candidates that were judged and served, by version."""
    outcomes: dict[str, int] = field(default_factory=dict)
    """Publishes by verdict; `refused` counts those in which the gate turned a candidate down."""
    tokens_per_s: float | None = None
    wall_s: float | None = None
    evaluated: float | None = None
    """Mean reward of the exported weights, computed in fp32, on questions drawn with a seed of
    their own."""
    skipped: int = 0
    """Steps that changed nothing: their loss or gradient was not finite."""

    def line(self) -> str:
        """For the console."""
        if not self.completed:
            return f"failed after {self.steps} steps: {self.error}"
        return f"reward {self.reward:.3f}, {self.wall_s:.0f} s"


def record_of(
    summary: Mapping[str, Any] | None,
    arm: str,
    seed: int,
    made: Mapping[str, Any],
    evaluation: Mapping[str, Any] | None = None,
) -> Run:
    """A run from its summary.json, None where it wrote none, the command's own record and, where
    there is one, its evaluation.json."""
    found = summary or {}
    code = made["exit_code"]
    reward = found.get("reward_last10")
    ended = found.get("status") == "completed" and code == 0
    completed = ended and is_number(reward)
    error = str(found.get("error") or found.get("status") or "no summary")
    if ended:
        error = "no reward in the last ten steps"
    elif made.get("timed_out"):
        error = "not over after timeout_s"
    history = list(found.get("history", []))
    last = int(max((r["step"] for r in history), default=0))
    by_step = {int(r["step"]): r for r in history}
    steps = [by_step.get(step, {}) for step in range(1, last + 1)]
    publishes = list(found.get("publishes", []))
    outcomes: dict[str, int] = {}
    for publish in publishes:
        outcomes[publish["verdict"]] = outcomes.get(publish["verdict"], 0) + 1
    outcomes["refused"] = int(found.get("refused", 0))
    return Run(
        arm=arm,
        seed=seed,
        completed=completed,
        error="" if completed else f"{error} (exit code {code})",
        steps=last,
        reward=reward if completed else None,
        curves={name: [_value(r, name) for r in steps] for name in CURVES},
        rises={
            int(p["version"]): float(p["perplexity_rise"])
            for p in publishes
            if p["verdict"] in ("accepted", "demoted") and is_number(p.get("perplexity_rise"))
        },
        outcomes=outcomes,
        tokens_per_s=found.get("tokens_per_s"),
        wall_s=made.get("wall_s"),
        evaluated=evaluation["reward"] if evaluation else None,
        skipped=sum(bool(r.get("skipped")) for r in history),
    )


def _value(step: Mapping[str, Any], name: str) -> float | None:
    if name == "left_out":
        kinds = ("masked", "vetoed", "rejected")
        parts = [_value(step, f"{kind}_fraction") for kind in kinds]
        return None if None in parts else sum(p for p in parts if p is not None)
    value: Any = step.get(name)
    return float(value) if is_number(value) else None


def estimate(values: Sequence[float | None]) -> dict[str, float | int | None]:
    """{"mean", "half", "low", "high", "n"} of the numbers among `values`; `half` of the interval is
    None for fewer than two, low and high are the smallest and the largest."""
    numbers = [float(v) for v in values if v is not None and math.isfinite(v)]
    n = len(numbers)
    ends = {"low": min(numbers, default=None), "high": max(numbers, default=None), "n": n}
    if n < 2:
        return {"mean": numbers[0] if n else None, "half": None, **ends}
    middle = math.fsum(numbers) / n
    spread = math.sqrt(math.fsum((v - middle) ** 2 for v in numbers) / (n - 1))
    return {"mean": middle, "half": t_quantile(CONFIDENCE, n - 1) * spread / math.sqrt(n), **ends}


def compare(
    runs: Sequence[Run],
    labels: Mapping[str, str],
    reference: str,
    default: str,
    failed_before: Mapping[str, int],
) -> dict[str, Any]:
    """Numbers of every arm in `labels`, over its completed runs, and of every run.

    `relative` is the final reward over the reference arm's of the same seed, `evaluated_relative`
    the same of the trained policies.
    """
    arms = {}
    base = {r.seed: r for r in runs if r.arm == reference and r.completed}
    for arm, label in labels.items():
        done = [r for r in runs if r.arm == arm and r.completed]
        pairs = [(r, base[r.seed]) for r in done if r.seed in base]
        outcomes: dict[str, int] = {}
        for run in done:
            for name, count in run.outcomes.items():
                outcomes[name] = outcomes.get(name, 0) + count
        arms[arm] = {
            "label": label,
            "completed": len(done),
            "failed": sum(r.arm == arm and not r.completed for r in runs)
            + failed_before.get(arm, 0),
            "reward": estimate([r.reward for r in done]),
            "relative": estimate([_ratio(r.reward, o.reward) for r, o in pairs]),
            "evaluated": estimate([r.evaluated for r in done]),
            "evaluated_relative": estimate([_ratio(r.evaluated, o.evaluated) for r, o in pairs]),
            "mismatch_k3": estimate([mean(r.curves["mismatch_k3"]) for r in done]),
            "policy_age": estimate([mean(r.curves["policy_age_mean"]) for r in done]),
            "lowest_ess": estimate([_lowest(r.curves["ess"]) for r in done]),
            "left_out": estimate([mean(r.curves["left_out"]) for r in done]),
            "perplexity_rise": estimate([mean(r.rises.values()) for r in done]),
            "tokens_per_s": estimate([r.tokens_per_s for r in done]),
            "outcomes": outcomes,
            "windows": _windows([r.curves["reward"] for r in done]),
            "curves": {name: _curve([r.curves[name] for r in done]) for name in CURVES},
            "rises": _by_version([r.rises for r in done]),
        }
    return {
        "reference": reference,
        "default": default,
        "arms": arms,
        "runs": [
            {"arm": r.arm, "seed": r.seed, "completed": r.completed, "error": r.error,
             "steps": r.steps, "reward": r.reward, "evaluated": r.evaluated,
             "wall_s": r.wall_s, "skipped": r.skipped}
            for r in runs
        ],
    }  # fmt: skip


def _ratio(value: float | None, reference: float | None) -> float | None:
    return value / reference if value is not None and reference else None


def _lowest(values: Sequence[float | None]) -> float | None:
    return min((v for v in values if v is not None), default=None)


def _curve(curves: Sequence[Sequence[float | None]]) -> list[dict[str, Any]]:
    """An estimate over the seeds for every step that some run reached."""
    longest = max((len(c) for c in curves), default=0)
    return [
        {"step": i + 1, **estimate([c[i] for c in curves if i < len(c)])} for i in range(longest)
    ]


def _windows(curves: Sequence[Sequence[float | None]]) -> list[dict[str, Any]]:
    """Mean reward of every WINDOW steps: over the runs, of the lowest and of the highest run."""
    longest = max((len(c) for c in curves), default=0)
    rows = []
    for start in range(0, longest, WINDOW):
        each = [m for c in curves if (m := mean(c[start : start + WINDOW])) is not None]
        last = min(start + WINDOW, longest)
        rows.append({"first": start + 1, "last": last, **estimate(each)})
    return rows


def _by_version(rises: Sequence[Mapping[int, float]]) -> list[dict[str, Any]]:
    versions = sorted({version for r in rises for version in r})
    return [{"step": v, **estimate([r[v] for r in rises if v in r])} for v in versions]
