"""The kinds of work that Quantizer replicas do in rounds, and what each hands back.

Items hold all that a replica needs besides the weights of the version, which it loads if it has
another one. Statistics and tensors of artifacts go to the store, and the result only says where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from forge_ptq.manifest import TensorSpec
from forge_ptq.services.ladder import Move
from forge_ptq.services.sampler import Rollout
from forge_ptq.store_artifacts import ArtifactPart
from forge_ptq.store_stats import ShareKey


@dataclass(frozen=True)
class Observe:
    """Measure one share of a calibration round's batches; statistics go to the store."""

    version: int
    round: int
    pass_: int
    share: int
    batches: Sequence[Sequence[Rollout]]
    shift: Mapping[str, torch.Tensor]
    """log2 smoothing factors per site, int8 [C]; inputs are divided by them."""
    checkpoint_every: int
    keep: int


@dataclass(frozen=True)
class ShareDone:
    """Where the share's statistics lie."""

    key: ShareKey
    tokens: int
    resumed: int
    """Batches that came from another attempt's checkpoint."""


@dataclass(frozen=True)
class Smooth:
    """Choose smoothing factors from the merged statistics of a pass over raw inputs."""

    version: int
    round: int
    pass_: int
    alpha: float | None
    down_proj: bool


@dataclass(frozen=True)
class SmoothDone:
    """Factors (log2, int8 [C]) and strength per smoothed site."""

    shift: Mapping[str, torch.Tensor]
    alpha: Mapping[str, float]


@dataclass(frozen=True)
class Plan:
    """Choose static ranges from the merged statistics, and in mode auto the scheme per layer."""

    version: int
    round: int
    pass_: int
    shift: Mapping[str, torch.Tensor]
    method: str
    percentile: float
    auto: bool
    budget: float
    max_evaluations: int
    rollouts: Sequence[Rollout]
    """Plans are measured on these; only for auto."""
    start: Mapping[str, str] | None = None
    """Layers of the calibration before, to be tried first; only for auto."""


@dataclass(frozen=True)
class PlanDone:
    """Scheme and range per layer."""

    layers: Mapping[str, str]
    absmax: Mapping[str, float]
    predicted_rise: float | None


@dataclass(frozen=True)
class Quantize:
    """Quantize one of several shares of the parameters; tensors go to the store."""

    version: int
    artifact_id: str
    part: int
    parts: int
    scheme: str | None
    """One scheme for every layer; None: the calibration's layers, or the plan's without one."""
    calibration: int | None
    """Round of the calibration to use; None: none."""
    corrupt: bool = False
    overlay: Mapping[str, str] = field(default_factory=dict)
    """Layer -> scheme that it gets where it is better than the planned one: demotions. Not for one
    scheme for all."""


@dataclass(frozen=True)
class PartDone:
    """One part of an artifact, and what its manifest has to say about it."""

    part: ArtifactPart
    specs: Mapping[str, TensorSpec]
    asked: Mapping[str, str]
    used: Mapping[str, str]
    notes: Mapping[str, str]
    model: str
    weight_error: Mapping[str, float] = field(default_factory=dict)
    """int8 layer -> |W - dequantized| / |W|."""
    codes_changed: int = 0
    """Of the codes compared with those of the version that this replica quantized before."""
    codes_compared: int = 0


@dataclass(frozen=True)
class Rank:
    """Order the layers by what a better scheme gains, for demotions."""

    version: int
    calibration: int | None
    """Round whose statistics tell; None: by class and weight error."""
    overlay: Mapping[str, str]
    """Demotions already made, see Quantize."""


@dataclass(frozen=True)
class RankDone:
    """Moves to the next better scheme, most useful first."""

    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Reference:
    """Score rollouts under the full-precision policy, and measure inputs on the way."""

    version: int
    rollouts: Sequence[Rollout]
    calibration: int | None
    """Round whose statistics the inputs will be compared with; None: do not measure."""


@dataclass(frozen=True)
class ReferenceDone:
    """hidden: [R, H] per rollout. stats: a packed table of the inputs, with its layout's sites."""

    hidden: Sequence[torch.Tensor]
    stats: Mapping[str, torch.Tensor] | None
    sites: tuple[tuple[str, int], ...]


Work = Observe | Smooth | Plan | Quantize | Rank | Reference
Done = ShareDone | SmoothDone | PlanDone | PartDone | RankDone | ReferenceDone
