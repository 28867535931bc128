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
    calibrated: bool = False
    """This publish refreshed the static activation scales."""
    quantize_s: float | None = None
    """Load, calibrate, quantize and store."""
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
    return value
