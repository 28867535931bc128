"""Every option of the warm-up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forge_ptq.config import Block, LRSchedulerConfig, OptimizerConfig
from forge_ptq.config.block import TrueShare


@dataclass(kw_only=True)
class PolicySizeConfig(Block):
    """Sizes of the policy made from scratch (forge_ptq/models/tiny.py)."""

    hidden: int = 192
    """Width; a multiple of 192."""

    layers: int = 3
    """Transformer blocks."""

    intermediate: int = 512
    """Width of the MLP."""


@dataclass(kw_only=True)
class DemonstrationsConfig(Block):
    """Questions and worked answers."""

    task_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of reasoning-gym's chain_sum; the GRPO run's dataset.task_args."""

    seed: int = 1_000
    """Seed of the questions."""

    prompt_template: str = "{question}\n"
    """The prompt; `{question}` is replaced. The GRPO run's dataset.prompt_template."""

    untagged_rate: TrueShare = 0.5
    """Share of the solutions without the answer tag (demonstrations.py says why)."""


@dataclass(kw_only=True)
class SFTConfig(Block):
    """One warm-up: `python -m apps.sft.main`."""

    output: str
    """Checkpoint folder to make. One already made from the same configuration is kept."""

    seed: int = 0
    """Seed of the initial weights and of the missing tags."""

    steps: int
    """Optimizer steps."""

    batch_size: int
    """Demonstrations per step."""

    threads: int | None = None
    """CPU threads; null takes all cores."""

    policy: PolicySizeConfig = field(default_factory=PolicySizeConfig)
    """Its sizes."""

    demonstrations: DemonstrationsConfig
    """What it imitates."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer."""

    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    """Learning rate over time."""

    max_norm: float = 1.0
    """Gradient clipping: largest global norm."""
