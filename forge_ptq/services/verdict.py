"""Verdict: what became of one publish, with every number that the decision used."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["accepted", "fell_back", "kept"]


@dataclass
class Verdict:
    """Result of ``PTQ.publish``. Rises are relative (0.03 is 3 %), times in seconds.

    What was not measured, because the publish did not get that far, is None.

    outcome: "accepted" - the quantized candidate serves; "fell_back" - this version serves in bf16;
    "kept" - nothing changed, the generator serves what it served before.
    """

    version: int
    outcome: Outcome = "kept"
    reason: str = ""
    """Why, in one sentence with the numbers."""
    refused: bool = False
    """A quantized candidate was probed and its scores refused it (also if bf16 then took over)."""
    artifact_id: str | None = None
    """The artifact that serves (accepted, fell_back) or was refused."""
    scheme: str = ""
    """Schemes of the candidate's layers with their counts, as in "int8_dynamic:28 bf16:4"."""
    perplexity_rise: float | None = None
    """exp(mean KL) - 1 against the full-precision policy; by paired NLL where KL is unknown.
    Of the refused candidate if one was refused, else of what serves."""
    nll_rise: float | None = None
    """Paired rise in NLL, nats per token."""
    nll_perplexity_rise: float | None = None
    kl: float | None = None
    """Mean KL(reference || candidate), nats per token."""
    ci: tuple[float, float] | None = None
    """95 % interval of perplexity_rise, clustered by rollout."""
    worst_sequence_rise: float | None = None
    probe_tokens: int = 0
    probe_sequences: int = 0
    flop_share: dict[str, float] | None = None
    """Share of the linear layers' FLOPs by scheme, lm_head not counted."""
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


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
