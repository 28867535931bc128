"""The `ptq` block: what this project adds to a torchforge configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from .block import Block, NaturalInt, Positive, PositiveInt, TrueShare
from .calibration import (
    CalibrationConfig,
    DriftConfig,
    MergeConfig,
    PlanConfig,
    SmoothingConfig,
)
from .guard import ABConfig, GuardConfig, PrecisionByLoadConfig


@dataclass(kw_only=True)
class ProbeConfig(Block):
    """Held-out rollouts that judge a candidate."""

    sequences: PositiveInt = 32
    """Sequences scored per candidate at first, of as many prompts as there are."""

    max_sequences: PositiveInt = 128
    """Most sequences scored while the evidence does not decide; then the point estimate does. With
    128 about 1 % pass of the candidates 10 % over the limit, and fewer fail of those 10 % under."""

    min_sequences: PositiveInt = 20
    """With fewer at hand a candidate cannot be judged and is not served. With 20, and no more to be
    had, 2 % pass of the candidates 25 % over the limit, and 2 % fail of those 20 % under."""

    max_tokens: PositiveInt | None = None
    """Longest sequence scored, prompt included, in tokens; null does not limit."""


@dataclass(kw_only=True)
class SamplerConfig(Block):
    """The pool of fresh rollouts that calibration and probe draw from."""

    capacity: PositiveInt = 512
    """Rollouts kept; the oldest leave first."""

    max_tokens: PositiveInt = 2_000_000
    """Tokens of all rollouts kept; the oldest leave first."""

    max_age: NaturalInt = 4
    """Rollouts of a policy more than this many versions old leave."""

    probe_fraction: TrueShare = 0.25
    """Share held out for the probe and used for neither calibration nor plan."""


@dataclass(kw_only=True)
class DeadlinesConfig(Block):
    """Seconds after which one phase of a publish counts as failed. The live slot stays as it is."""

    calibrate_s: Positive = 900.0
    """All of a calibration: with smoothing four rounds of work and two merges, else two and one.
    Each has `merge.deadline_s`."""

    quantize_s: Positive = 300.0
    """Load and quantize."""

    stage_s: Positive = 120.0
    """Load the artifact into the idle slot, waiting for the slot to drain included."""

    probe_s: Positive = 120.0
    """Score the candidate and the reference."""

    commit_s: Positive = 30.0
    """Flip."""

    drain_s: Positive = 60.0
    """Wait for the idle slot's last sequences before they are moved to the live slot."""


@dataclass(kw_only=True)
class PTQConfig(Block):
    """Post-training quantization in the loop."""

    enabled: bool = True
    """Off, the generator serves the pushed bf16 weights."""

    publish_every: PositiveInt = 1
    """Training steps between two publishes."""

    calibrate_every: PositiveInt = 100
    """Trainer steps between two calibrations; drift may cause one earlier. In between scales stay
    as they are."""

    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    """Measuring the inputs of the layers."""

    smoothing: SmoothingConfig = field(default_factory=SmoothingConfig)
    """SmoothQuant."""

    merge: MergeConfig = field(default_factory=MergeConfig)
    """From many replicas' statistics to one."""

    plan: PlanConfig = field(default_factory=PlanConfig)
    """Scheme per layer."""

    drift: DriftConfig = field(default_factory=DriftConfig)
    """When to calibrate early."""

    guard: GuardConfig = field(default_factory=GuardConfig)
    """Gate before traffic, and the watch after it."""

    ab: ABConfig = field(default_factory=ABConfig)
    """Comparison with full precision on live prompts."""

    precision_by_load: PrecisionByLoadConfig = field(default_factory=PrecisionByLoadConfig)
    """Scheme of new sequences by load."""

    probe: ProbeConfig = field(default_factory=ProbeConfig)
    """What the gate measures on."""

    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """Pool of rollouts."""

    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)
    """Limits in time."""

    def needs_calibration(self) -> bool:
        """Whether anything of the plan depends on measured inputs."""
        plan = self.plan
        schemes = {plan.default, *plan.overrides.values()}
        if plan.mode == "auto" or "int8_static" in schemes:
            return True
        return self.smoothing.enabled and schemes != {"bf16"}
