"""Verdict: what became of one publish, with every number that the decision used; Rollback: what was
taken back after the fact."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from forge_ptq.services.passage import Transition

Outcome = Literal["accepted", "demoted", "fell_back", "kept"]


@dataclass
class Verdict:
    """Result of ``PTQ.publish``. Rises are relative (0.03 is 3 %), times in seconds.

    What was not measured, because the publish did not get that far, is None.

    outcome: "accepted" - the candidate serves, quantized as planned; "demoted" - it serves with
    some layers in a better scheme than planned; "fell_back" - this version serves in bf16; "kept"
    - nothing changed, the generator serves what it served before.
    """

    version: int
    outcome: Outcome = "kept"
    reason: str = ""
    """Why, in one sentence with the numbers."""
    refused: bool = False
    """A quantized candidate was judged and refused (also if another one then took over)."""
    artifact_id: str | None = None
    """The artifact that serves (accepted, demoted, fell_back) or was refused last."""
    scheme: str = ""
    """Schemes of the candidate's layers with their counts, as in "int8_dynamic:28 bf16:4"."""
    perplexity_rise: float | None = None
    """exp(mean KL) - 1 against the full-precision policy; by paired NLL where KL is unknown.
    Of the quantized candidate scored last, which is the one that serves if one does (accepted,
    demoted); of the version in bf16 only if no quantized candidate was scored."""
    refused_rise: float | None = None
    """The same of the worst quantized candidate that was refused, whatever came after it; None if
    none was, or none of those had been scored."""
    nll_rise: float | None = None
    """Paired rise in NLL, nats per token."""
    nll_perplexity_rise: float | None = None
    kl: float | None = None
    """Mean KL(reference || candidate), nats per token."""
    ci: tuple[float, float] | None = None
    """Interval of perplexity_rise that the guard decided by, clustered by prompt."""
    worst_sequence_rise: float | None = None
    token_kl: float | None = None
    """99th percentile of the tokens' KL, nats."""
    probe_looks: int = 0
    """How often the guard looked; it asks for more rollouts while they do not decide."""
    context_ess: float | None = None
    """How far the probe's rollouts are from what the full-precision policy would have sampled:
    effective sample size of its contexts among theirs, as a share of the tokens."""
    probe_tokens: int = 0
    probe_sequences: int = 0
    flop_share: dict[str, float] | None = None
    """Share of the linear layers' FLOPs by scheme, lm_head not counted."""
    attempts: int = 0
    """Candidates made."""
    demotions: int = 0
    """Steps down taken for this version."""
    promoted: bool = False
    """A step was taken back, on trial."""
    level: int = 0
    """Steps down from the plan, after this publish."""
    demoted_share: float | None = None
    """Share of the linear FLOPs in a better scheme than planned."""
    weight_error: float | None = None
    """Largest |W - dequantized| / |W| of a layer (Frobenius norms)."""
    weight_error_layer: str = ""
    code_flip_fraction: float | None = None
    """Share of the int8 weight codes that changed since a replica last quantized the layer: usually
    since the version before (code_flips.py)."""
    transitions: tuple[Transition, ...] = ()
    """Of the state machine in ladder.py, in order; those of probations since the last publish
    come first."""
    calibrated: bool = False
    """This publish made the scales anew."""
    calibration_reason: str = ""
    """Why it did, or tried to: first, period, drift, refused or more rollouts."""
    calibration_failed: bool = False
    """It tried to and could not."""
    calibration_round: int | None = None
    """The calibration behind the candidate's scales; None if it needs none."""
    calibration_version: int | None = None
    """Policy version that it was made on."""
    calibration_tokens: int = 0
    contributors: tuple[str, ...] = ()
    """Replicas whose statistics went into it."""
    dropped: tuple[str, ...] = ()
    """Replicas or shares whose statistics did not, with the reason."""
    predicted_rise: float | None = None
    """Perplexity rise that the search for the plan measured (mode auto)."""
    drift_clipped_fraction: float | None = None
    """Over the static layers, the largest share of |x| above the range of its scale."""
    drift_js_distance: float | None = None
    """Largest Jensen-Shannon distance between |x| now and when calibrated, 0 to 1."""
    drift_absmax_ratio: float | None = None
    """Largest max|x| in units of the calibrated one."""
    drift_layer: str = ""
    """Where most is clipped."""
    drift_exceeded: str | None = None
    """The threshold that was passed, so that the next publish calibrates."""
    calibrate_s: float | None = None
    """Measure, merge, smooth and plan."""
    quantize_s: float | None = None
    """Load, quantize and store."""
    stage_s: float | None = None
    probe_s: float | None = None
    """Score reference and candidate."""
    flip_s: float | None = None
    pause_s: float | None = None
    """Longest time that running sequences waited for a step during the publish."""
    step_s_median: float | None = None
    """Usual time of a step in the same period."""
    wall_s: float = 0.0
    bytes: int | None = None
    """Size of the artifact."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; what is not finite becomes None."""
        return {key: _plain(value) for key, value in dataclasses.asdict(self).items()}


@dataclass(frozen=True)
class Rollback:
    """What ``PTQ.watch`` took back. artifact_from served and never will again; artifact_to serves.

    exact: artifact_to is the very artifact that was confirmed before; otherwise it is version_to
    made anew in bf16. behind: generator replicas that had not said within the deadline that they
    serve it; they end themselves and come back with it.
    """

    version_from: int
    version_to: int
    artifact_from: str
    artifact_to: str
    reason: str
    exact: bool
    behind: int
    transitions: tuple[Transition, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; what is not finite becomes None."""
        return {key: _plain(value) for key, value in dataclasses.asdict(self).items()}

    def __str__(self) -> str:
        how = "exactly" if self.exact else "in bf16"
        late = f"; {self.behind} replicas are behind" if self.behind else ""
        return (
            f"version {self.version_from} ({self.artifact_from}) was rolled back to version "
            f"{self.version_to} {how} ({self.artifact_to}) in {self.seconds:.1f} s: "
            f"{self.reason}{late}"
        )


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
