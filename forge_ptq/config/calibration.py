"""Blocks of `ptq` about scales: which rollouts measure them, how replicas' statistics become one,
which layer gets which scheme, and when all that is done again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from forge_ptq.numerics.names import RangeMethod

from .block import (
    Block,
    NaturalInt,
    NotNegative,
    Positive,
    PositiveInt,
    PositiveShare,
    Range,
    Scheme,
    Share,
)

Factor = Annotated[float, Range("1 or more", lambda v: 1 <= v < float("inf"))]
Percent = Annotated[float, Range("more than 0, at most 100", lambda v: 0 < v <= 100)]

LEAST_SHARE = 0.25
"""Of the rollouts that a calibration asks for; with fewer at hand there is none."""


@dataclass(kw_only=True)
class CalibrationConfig(Block):
    """How the inputs of the linear layers are measured."""

    rollouts: PositiveInt = 64
    """Rollouts per calibration, drawn evenly from good, bad and undecided ones. With fewer than a
    quarter of them at hand nothing is quantized yet; one made with fewer than all is made again
    once they are there."""

    batch_tokens: PositiveInt = 4096
    """Tokens per forward pass of a calibration."""

    range: RangeMethod = "absmax"
    """Which |x| a static scale maps to 127: the largest, a percentile, or the one with the smallest
    expected error (mse) or divergence (kl)."""

    percentile: Percent = 99.99
    """For `percentile`: share of |x| within the range, in percent."""

    checkpoint_every: PositiveInt = 50
    """Batches after which a replica saves its statistics, so that another can take over."""

    keep_versions: PositiveInt = 3
    """Such checkpoints kept per share while it is at work, and calibrations kept in the store."""

    oversample: Factor = 1.2
    """Quantizer replicas per share of the work: 1.2 lets every sixth stand by to take over."""


@dataclass(kw_only=True)
class SmoothingConfig(Block):
    """Move large activations into the weights before quantizing (SmoothQuant), by powers of two, so
    that the full-precision policy stays the same bit for bit."""

    enabled: bool = True
    """Measure and smooth. Off, inputs are quantized as they are."""

    alpha: Share | None = None
    """Strength: 0 moves nothing, 1 all. null chooses it per layer."""

    down_proj: bool = True
    """Smooth the inputs of down_proj too, by half a power at most: its outliers are rare and huge,
    and the weights take more of them badly."""


@dataclass(kw_only=True)
class MergeConfig(Block):
    """How the replicas' statistics become one, and how long to wait for them."""

    rule: Literal["histogram", "max", "weighted_mean", "median"] = "histogram"
    """How one absmax comes from many. `histogram` and `max` take the largest."""

    sigma_clip: NotNegative = 25.0
    """Statistics whose absmax is further than this many robust standard deviations from the median
    are left out and reported; 0 keeps all."""

    heartbeat_s: Positive = 2.0
    """Seconds of silence after which a replica's share goes to another one."""

    deadline_s: Positive = 120.0
    """Seconds for one round of work; what is not there then is missing."""

    quorum: PositiveShare = 0.85
    """Share of the statistics that must be there; with fewer the version is served in bf16."""


@dataclass(kw_only=True)
class PlanConfig(Block):
    """Which scheme every linear layer serves in."""

    mode: Literal["fixed", "auto"] = "fixed"
    """`fixed`: as `default` and `overrides` say. `auto`: at every calibration each layer gets the
    cheapest scheme (static, then dynamic, then bf16) that keeps the whole model within `budget`."""

    default: Scheme = "int8_dynamic"
    """Scheme of every linear layer that no override names: int8_dynamic, int8_static or bf16. No
    effect in mode `auto`."""

    overrides: dict[str, Scheme] = field(default_factory=dict)
    """Scheme by pattern over HF module names, as in `"*.down_proj": bf16`. The last match wins.
    Layers that vLLM fuses (q/k/v, gate/up) must agree. Mode `auto` leaves these layers as they
    are here. lm_head is never quantized."""

    budget: PositiveShare = 0.02
    """For `auto`: perplexity rise that the plan may cost. Below the gate, which measures on other
    rollouts and later versions."""

    rollouts: PositiveInt = 24
    """For `auto`: rollouts that plans are measured on, in neither the calibration nor the probe."""

    response_tokens: PositiveInt = 32
    """For `auto`: first tokens of each response that are scored. Many rollouts say more than long
    ones."""

    max_evaluations: PositiveInt = 24
    """For `auto`: plans measured per calibration; each costs one forward pass over `rollouts`."""


@dataclass(kw_only=True)
class DriftConfig(Block):
    """When inputs have moved so far from what the scales were made for that they are made anew. One
    layer over one of the thresholds is enough; only static layers count."""

    enabled: bool = True
    """Recalibrate on drift. Off, it is measured all the same."""

    max_clipped_fraction: PositiveShare = 0.002
    """Share of |x| above the range of its scale, beyond what the range was chosen to cut off."""

    max_js_distance: PositiveShare = 0.2
    """Jensen-Shannon distance between the histograms of |x|, from 0 to 1. 0.2 is what inputs show
    that have grown by half."""

    max_absmax_ratio: Factor = 4.0
    """Largest |x| now, in units of the calibrated one."""

    min_steps: NaturalInt = 5
    """Trainer steps after a calibration before drift, or a candidate that the gate refused, can
    cause the next."""
