"""The gate before traffic: pure decisions on a staged candidate, no I/O.

    decide(evidence, limits)
        1 complete   every generator replica reports the artifact staged in its idle slot
        2 audit      the schemes that each engine would run are the ones the manifest promises
        3 finite     no NaN or infinity in any score
        4 enough     at least min_sequences probe rollouts were scored
        5 rise       perplexity rise <= max_perplexity_rise

The first gate that fails decides, so a reason names the most basic thing that is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forge_ptq.numerics.divergence import Divergence


@dataclass(frozen=True)
class Limits:
    """When a candidate may serve."""

    max_perplexity_rise: float = 0.03
    """Relative: 0.03 is 3 %."""
    min_sequences: int = 1
    """Fewest scored rollouts that can accept a candidate."""


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


@dataclass(frozen=True)
class Decision:
    """accepted, and why (or why not)."""

    accepted: bool
    reason: str
    refused: bool = False
    """Its scores were judged and found wanting (gates 3 and 5), not just missing or unusable."""


def decide(evidence: Evidence, limits: Limits) -> Decision:
    """Run the gates in order; see the module's docstring."""
    for failed in (_incomplete(evidence), _audit(evidence)):
        if failed:
            return Decision(False, failed)
    if evidence.divergence is None:
        if set(evidence.layers.values()) - {"bf16"}:
            return Decision(False, "not probed: a quantized candidate is never served unprobed")
        return Decision(True, "full precision, not probed")
    return _judge(evidence.divergence, limits)


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


def _judge(divergence: Divergence, limits: Limits) -> Decision:
    if divergence.non_finite:
        reason = f"not finite: {divergence.non_finite} probe scores are NaN or inf"
        return Decision(False, reason, refused=True)
    if divergence.sequences < limits.min_sequences:
        return Decision(
            False,
            f"not enough probe rollouts: scored {divergence.sequences}, "
            f"need {limits.min_sequences}",
        )
    low, high = divergence.ci
    numbers = (
        f"perplexity rise {divergence.perplexity_rise:.2%} "
        f"[{low:.2%}, {high:.2%}] by {divergence.estimator} over {divergence.tokens} tokens of "
        f"{divergence.sequences} rollouts, limit {limits.max_perplexity_rise:.2%}"
    )
    # Written so that NaN refuses.
    if not divergence.perplexity_rise <= limits.max_perplexity_rise:
        return Decision(False, numbers, refused=True)
    return Decision(True, numbers)
