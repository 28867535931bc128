"""torchtitan's optimizer and learning-rate containers from torchforge's flat config blocks."""

from __future__ import annotations

from typing import Any

from torch import nn

from forge_ptq.config.titan import LRSchedulerConfig, OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Any:
    """One parameter group over the whole model: an OptimizersContainer."""
    from torchtitan.components.optimizer.optimizer import OptimizersContainer, ParamGroupConfig

    group = ParamGroupConfig(
        pattern=r".*",
        optimizer_name=config.name,
        optimizer_kwargs={
            "lr": config.lr,
            "betas": (config.beta1, config.beta2),
            "eps": config.eps,
            "weight_decay": config.weight_decay,
        },
    )
    titan = OptimizersContainer.Config(param_groups=[group], implementation="fused")
    return OptimizersContainer(titan, model_parts=[model])


def build_lr_scheduler(optimizers: Any, config: LRSchedulerConfig, steps: int) -> Any:
    """Warm-up, plateau, decay over `steps`: an LRSchedulersContainer."""
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

    titan = LRSchedulersContainer.Config(
        warmup_steps=min(config.warmup_steps, steps),
        decay_ratio=config.decay_ratio,
        decay_type=config.decay_type,
        min_lr_factor=config.min_lr_factor,
    )
    return titan.build(optimizers=optimizers, training_steps=steps)
