"""How far the generator that sampled the tokens is from the trainer that learns from them.

Both score the same sampled tokens at the sampling temperature; per token, in fp32:

    gap   = trainer log-probability - generator log-probability
    ratio = exp(gap), the importance ratio; in it and in k3 |gap| is held at 20, so that its square
            stays finite

Every sequence becomes one row of sums and maxima in fp64 (`COLUMNS`), so that a step may be split
into micro-batches and over ranks in any way: rows are concatenated, never averaged, and `reduce`
makes the step's numbers from them.

    k1 = sum(-gap) / tokens                    KL(generator || trainer), unbiased, may be negative
    k3 = sum(ratio - 1 - gap) / tokens         the same, never negative, less noise [1]
    ess = sum(ratio)^2 / (tokens * sum(ratio^2))        effective sample size, a share of the tokens

Counted are response tokens whose log-probabilities are finite on both sides, before any correction
leaves tokens out: a mask must not hide the mismatch that it answers.

[1] J. Schulman, Approximating KL divergence, 2020. ESS: A. Kong, 1992.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forge_ptq.config.guard import ProbationConfig
from forge_ptq.config.loss import AlarmsConfig

MAX_GAP = 20.0
"""Nats at which |gap| is held inside `ratio`: exp(20) is 5e8."""

COLUMNS = (
    "response_tokens",
    "tokens",
    "k1_sum",
    "k3_sum",
    "ratio_sum",
    "ratio_sq_sum",
    "ratio_max",
    "max_abs_gap",
    "masked",
    "vetoed",
    "rejected",
)
"""Of a row. `tokens`: those with finite log-probabilities, which the sums and maxima are over.
`masked`, `vetoed`, `rejected`: response tokens left out of the loss by a mask, by the veto of their
sequence, or with a sequence that has a log-probability that is not finite; no token counts twice.
"""

MAXIMA = frozenset({"ratio_max", "max_abs_gap"})

Row = Mapping[str, float]
"""One sequence: a value for each of `COLUMNS`."""


@dataclass(frozen=True, kw_only=True)
class SequenceMismatch:
    """The mismatch of one trained sequence, and where the sequence came from."""

    artifact_id: str
    """Of the weights that sampled it."""
    scheme: str
    """Of those weights: "bf16", "int8_dynamic", "int8_static+int8_dynamic"..."""
    policy_version: int
    """Trainer step whose weights they were made from."""
    age: int
    """Trainer steps since that version when the sequence was trained on."""
    tokens: int
    """Response tokens with finite log-probabilities: the sums and the maximum are over these."""
    k1_sum: float
    """Divide by `tokens` for the k1 estimate of KL(generator || trainer) in nats."""
    k3_sum: float
    """The same for k3."""
    ratio_sum: float
    """Of trainer over generator probability."""
    ratio_sq_sum: float
    """Of its square."""
    max_abs_gap: float
    """Largest |log ratio|, nats."""
    reward: float
    group: str
    """Names the prompt's group of responses."""
    left_out: int = 0
    """Response tokens that a mask or the veto left out of the loss."""
    rejected: int = 0
    """Response tokens of a sequence that was left out for a log-probability that is not finite."""
    sampled_finite: bool = True
    """Whether those under which it was sampled are all finite: then it is the trainer's fault."""


def sequence_rows(
    gap_BR: Tensor,
    response_BR: Tensor,
    valid_BR: Tensor,
    masked_BR: Tensor,
    vetoed_BR: Tensor,
    rejected_BR: Tensor,
) -> Tensor:
    """[B, len(COLUMNS)] fp64, one row per sequence.

    `gap_BR` [B, R] fp32 may hold anything where `valid_BR` is false. The others are bool [B, R]:
    response tokens, those of them with finite log-probabilities, and those left out of the loss.
    """
    gap = gap_BR.detach().masked_fill(~valid_BR, 0.0)
    held = gap.clamp(-MAX_GAP, MAX_GAP)
    ratio = held.exp().masked_fill(~valid_BR, 0.0)
    # expm1 keeps the digits of small gaps, which cancel in exp(gap) - 1 - gap.
    k3 = (torch.expm1(held.double()) - held.double()).masked_fill(~valid_BR, 0.0)

    def largest(values_BR: Tensor) -> Tensor:
        return values_BR.amax(1) if values_BR.shape[1] else values_BR.new_zeros(len(values_BR))

    columns = {
        "response_tokens": response_BR.sum(1),
        "tokens": valid_BR.sum(1),
        "k1_sum": -gap.double().sum(1),
        "k3_sum": k3.sum(1),
        "ratio_sum": ratio.double().sum(1),
        "ratio_sq_sum": ratio.double().square().sum(1),
        "ratio_max": largest(ratio),
        "max_abs_gap": largest(gap.abs()),
        "masked": masked_BR.sum(1),
        "vetoed": vetoed_BR.sum(1),
        "rejected": rejected_BR.sum(1),
    }
    return torch.stack([columns[name].double() for name in COLUMNS], dim=1)


def as_rows(rows: Tensor) -> list[dict[str, float]]:
    """[N, len(COLUMNS)] to one mapping per sequence."""
    return [dict(zip(COLUMNS, values, strict=True)) for values in rows.tolist()]


def reduce(rows: Iterable[Row]) -> dict[str, float]:
    """The step's numbers from its sequences' rows: mismatch_k1, mismatch_k3, ratio_mean,
    ratio_std, ratio_max, ess, max_abs_gap, masked_fraction, vetoed_fraction, rejected_fraction.

    Means are over tokens. Where no token could be compared, all are 0: no evidence of agreement,
    and an effective sample of nothing.
    """
    total = dict.fromkeys(COLUMNS, 0.0)
    for row in rows:
        for name in COLUMNS:
            value = row[name]
            total[name] = max(total[name], value) if name in MAXIMA else total[name] + value
    tokens = max(total["tokens"], 1.0)
    mean = total["ratio_sum"] / tokens
    square = total["ratio_sq_sum"] / tokens
    response = max(total["response_tokens"], 1.0)
    return {
        "mismatch_k1": total["k1_sum"] / tokens,
        "mismatch_k3": total["k3_sum"] / tokens,
        "ratio_mean": mean,
        "ratio_std": math.sqrt(max(square - mean**2, 0.0)),
        "ratio_max": total["ratio_max"],
        "ess": mean**2 / square if square else 0.0,
        "max_abs_gap": total["max_abs_gap"],
        "masked_fraction": total["masked"] / response,
        "vetoed_fraction": total["vetoed"] / response,
        "rejected_fraction": total["rejected"] / response,
    }


OLDEST_AGE = 4
"""Ages from here on share one name."""


def scheme_label(scheme: str) -> str:
    """A scheme as part of a metric's name: "int8_static+bf16" -> "bf16_int8_static". Sorted, so
    that a plan in which two schemes trade places keeps its name."""
    parts = sorted(re.sub(r"[^a-z0-9]+", "_", part.lower()) for part in scheme.split("+"))
    return "_".join(parts).strip("_") or "unknown"


def age_label(age: int) -> str:
    """An age as part of a metric's name: age_0 to age_3, then age_4_up."""
    return f"age_{max(age, 0)}" if age < OLDEST_AGE else f"age_{OLDEST_AGE}_up"


def split(
    rows: Sequence[Row], schemes: Sequence[str] | None, ages: Sequence[int] | None
) -> dict[str, float]:
    """`reduce` within each scheme and each age: "mismatch_k3/int8_static", "mismatch_k3/age_1"...

    `schemes` and `ages` have one entry per row; None leaves that split out. Groups without a token
    to compare are left out.
    """
    groups: dict[str, list[Row]] = {}
    for labels in (
        None if schemes is None else [scheme_label(s) for s in schemes],
        None if ages is None else [age_label(a) for a in ages],
    ):
        for label, row in zip(labels, rows, strict=True) if labels is not None else ():
            groups.setdefault(label, []).append(row)
    parts: dict[str, float] = {}
    for label, members in sorted(groups.items()):
        if any(row["tokens"] for row in members):
            parts |= {f"{name}/{label}": value for name, value in reduce(members).items()}
    return parts


@dataclass(frozen=True)
class Alarm:
    """A number of one training step that is over its limit, or under it."""

    metric: str
    value: float
    key: str
    """Of the limit in the configuration."""
    limit: float

    def __str__(self) -> str:
        side = "under" if self.metric == "ess" else "over"
        return f"{self.metric} {self.value:.4g} is {side} {self.key} = {self.limit:g}"


def alarms(
    metrics: Mapping[str, float], probation: ProbationConfig, limits: AlarmsConfig
) -> list[Alarm]:
    """The alarms of one training step's metrics (`reduce`), most basic first. The thresholds of the
    mismatch itself are those on which the guard takes a version back."""
    watched = ["rejected_fraction", "vetoed_fraction", "masked_fraction", "max_abs_gap"]
    bounds = [(name, f"alarms.max_{name.removeprefix('max_')}") for name in watched]
    bounds.append(("mismatch_k3", "ptq.guard.probation.max_mismatch_kl"))
    bounds.append(("ess", "ptq.guard.probation.min_ess"))
    raised = []
    for metric, key in bounds:
        block = probation if key.startswith("ptq.") else limits
        limit, value = float(block[key.rpartition(".")[2]]), metrics.get(metric)
        if value is None:
            continue
        beyond = value < limit if metric == "ess" else value > limit
        if beyond or math.isnan(value):
            raised.append(Alarm(metric, value, key, limit))
    return raised
