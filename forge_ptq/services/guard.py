"""The gate before traffic: pure decisions on a staged candidate, no I/O.

    decide(evidence, limits, more=...)
        1 complete       every generator replica reports the artifact staged in its idle slot
        2 audit          the schemes that each engine would run are the ones the manifest promises
        3 weight error   of every layer, |W - dequantized| / |W| <= max_weight_error
        4 finite         no NaN or infinity in any score
        5 enough         at least min_sequences probe rollouts were scored
        6 token KL       its 99th percentile <= max_token_kl
        7 worst rollout  its perplexity rise <= max_worst_rise
        8 rise           interval of the perplexity rise against max_perplexity_rise:

            upper bound under the limit                     accepted
            lower bound over the limit                      refused
            limit within, more rollouts can be scored       undecided: score more, ask again
            limit within, that was all                      by the point estimate, and it says so

The first gate that fails decides, so a reason names the most basic thing that is wrong.

A candidate is looked at several times (``looks``), and with every look chance has another try. So
each look's interval is wider: its error is (1 - confidence) / looks, and over all of them at most
1 - confidence, whatever the looks have in common (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forge_ptq.numerics.divergence import Divergence

if TYPE_CHECKING:
    from forge_ptq.config import PTQConfig


@dataclass(frozen=True)
class Limits:
    """When a candidate may serve. Rises are relative: 0.03 is 3 %."""

    max_perplexity_rise: float = 0.03
    min_sequences: int = 1
    """Fewest scored rollouts that can accept a candidate."""
    max_worst_rise: float = math.inf
    """Of the single worst rollout."""
    max_token_kl: float = math.inf
    """99th percentile of the tokens' KL, nats. Not applied where KL is unknown."""
    max_weight_error: float = math.inf
    """|W - dequantized| / |W| of one layer, Frobenius norms."""
    confidence: float = 0.95
    """Of all looks at a candidate together."""
    looks: int = 1
    """Looks that are planned."""

    @classmethod
    def of(cls, cfg: PTQConfig, min_sequences: int | None = None) -> Limits:
        """Those of a configuration; min_sequences in place of ptq.probe.min_sequences."""
        guard, probe = cfg.guard, cfg.probe
        return cls(
            max_perplexity_rise=guard.max_perplexity_rise,
            min_sequences=probe.min_sequences if min_sequences is None else min_sequences,
            max_worst_rise=guard.max_worst_rise,
            max_token_kl=guard.max_token_kl,
            max_weight_error=guard.max_weight_error,
            confidence=guard.confidence,
            looks=len(looks(probe.sequences, probe.max_sequences)),
        )

    @property
    def look_confidence(self) -> float:
        """Level of the interval at one look."""
        return 1 - (1 - self.confidence) / self.looks


def looks(first: int, most: int) -> list[int]:
    """Rollouts scored at every look: first, doubled until there are most (first >= 1)."""
    sizes = [first]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes


@dataclass(frozen=True)
class StagedSlot:
    """What one generator replica says about its idle slot."""

    artifact_id: str | None
    complete: bool
    layers: Mapping[str, str]
    """HF module name -> scheme that the engine would run."""


@dataclass(frozen=True)
class Evidence:
    """All that is known about a candidate."""

    artifact_id: str
    layers: Mapping[str, str]
    """HF module name -> scheme, from the manifest."""
    staged: Sequence[StagedSlot]
    divergence: Divergence | None
    """None: the candidate is the full-precision policy itself and was not probed."""
    weight_error: Mapping[str, float] = field(default_factory=dict)
    """HF module name -> |W - dequantized| / |W|; layers that are not quantized may be left out."""


@dataclass(frozen=True)
class Decision:
    """accepted, and why (or why not)."""

    accepted: bool
    reason: str
    refused: bool = False
    """It was judged and found wanting (gates 3, 4, 6, 7, 8), not just missing or unusable."""
    undecided: bool = False
    """More probe rollouts may tell."""


def decide(evidence: Evidence, limits: Limits, *, more: bool = False) -> Decision:
    """Run the gates in order; see the module's docstring. more: whether more probe rollouts could
    still be scored; only then can the answer be "undecided"."""
    for failed in (_incomplete(evidence), _audit(evidence)):
        if failed:
            return Decision(False, failed)
    if failed := _weight_error(evidence, limits):
        return Decision(False, failed, refused=True)
    if evidence.divergence is None:
        if set(evidence.layers.values()) - {"bf16"}:
            return Decision(False, "not probed: a quantized candidate is never served unprobed")
        return Decision(True, "full precision, not probed")
    return _judge(evidence.divergence, limits, more)


def _incomplete(evidence: Evidence) -> str | None:
    if not evidence.staged:
        return "incomplete: no generator replica has staged the artifact"
    for replica, slot in enumerate(evidence.staged):
        if slot.artifact_id != evidence.artifact_id:
            return (
                f"incomplete: replica {replica} has {slot.artifact_id or 'nothing'} in its idle "
                f"slot, expected {evidence.artifact_id}"
            )
        if not slot.complete:
            return f"incomplete: replica {replica} has not filled its idle slot"
    return None


def _audit(evidence: Evidence) -> str | None:
    for replica, slot in enumerate(evidence.staged):
        differing = sorted(
            name
            for name in set(slot.layers) | set(evidence.layers)
            if slot.layers.get(name) != evidence.layers.get(name)
        )
        if differing:
            name = differing[0]
            return (
                f"audit: on replica {replica} {len(differing)} layers differ from the plan, first "
                f"{name}: the engine runs {slot.layers.get(name, 'nothing')}, the plan says "
                f"{evidence.layers.get(name, 'nothing')}"
            )
    return None


# The comparisons below are written so that NaN refuses.


def _weight_error(evidence: Evidence, limits: Limits) -> str | None:
    errors, limit = evidence.weight_error, limits.max_weight_error
    over = [name for name, error in errors.items() if not error <= limit]
    if not over:
        return None
    worst = max(over, key=lambda name: (math.isnan(errors[name]), errors[name], name))
    return (
        f"weight error: {len(over)} of {len(errors)} layers over the limit {limit:.2%}, worst "
        f"{worst}: {errors[worst]:.2%}"
    )


def _judge(divergence: Divergence, limits: Limits, more: bool) -> Decision:
    if divergence.non_finite:
        reason = f"not finite: {divergence.non_finite} probe scores are NaN or inf"
        return Decision(False, reason, refused=True)
    if divergence.sequences < limits.min_sequences:
        reason = (
            f"not enough probe rollouts: scored {divergence.sequences}, need {limits.min_sequences}"
        )
        return Decision(False, reason, undecided=more)
    if failed := _token_kl(divergence, limits) or _worst(divergence, limits):
        reason = f"{failed}; {_numbers(divergence, limits)}"
        return Decision(False, reason, refused=True)
    return _rise(divergence, limits, more)


def _percent(rise: float) -> str:
    """A bound from a handful of rollouts can be anything: 1e12 % says no more than "> 1000%"."""
    return "> 1000%" if rise > 10 else f"{rise:.2%}"


def _numbers(divergence: Divergence, limits: Limits) -> str:
    low, high = map(_percent, divergence.interval(limits.look_confidence))
    return (
        f"perplexity rise {_percent(divergence.perplexity_rise)} [{low}, {high}] by "
        f"{divergence.estimator} over {divergence.tokens} tokens of {divergence.sequences} "
        f"rollouts, limit {limits.max_perplexity_rise:.2%}"
    )


def _token_kl(divergence: Divergence, limits: Limits) -> str | None:
    kl = divergence.token_kl
    if kl is None or kl <= limits.max_token_kl:
        return None
    return (
        f"token KL: 99th percentile {kl:.3g} nats over {divergence.tokens} tokens, limit "
        f"{limits.max_token_kl:.3g}"
    )


def _worst(divergence: Divergence, limits: Limits) -> str | None:
    worst = divergence.worst_sequence_rise
    if worst <= limits.max_worst_rise:
        return None
    return (
        f"worst rollout: perplexity rise {_percent(worst)} in number {divergence.worst_sequence} "
        f"of {divergence.sequences}, limit {limits.max_worst_rise:.2%}"
    )


def _rise(divergence: Divergence, limits: Limits, more: bool) -> Decision:
    estimate, limit = divergence.perplexity_rise, limits.max_perplexity_rise
    low, high = divergence.interval(limits.look_confidence)
    numbers = _numbers(divergence, limits)
    if high < limit:
        return Decision(True, numbers)
    if low > limit:
        return Decision(False, numbers, refused=True)
    if more:
        return Decision(False, f"{numbers}: undecided, more rollouts are scored", undecided=True)
    if estimate <= limit:
        return Decision(True, f"{numbers}: undecided, accepted by the point estimate")
    return Decision(False, f"{numbers}: undecided, refused by the point estimate", refused=True)
