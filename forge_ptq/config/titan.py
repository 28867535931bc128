"""Blocks of `trainer` and `ref_model`: torchforge's names for torchtitan's options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from .block import Block, NaturalInt, NotNegative, Positive, PositiveInt, Share

PushRounding = Literal["auto", "nearest", "stochastic"]
"""How fp32 weights become bf16, see ``numerics.rounding``."""

PUSH_ROUNDINGS: tuple[str, ...] = get_args(PushRounding)


@dataclass(kw_only=True)
class ModelConfig(Block):
    """Which torchtitan model to build."""

    name: Literal["qwen3", "llama3"]
    """torchforge's option, no effect: the checkpoint's config.json names the family."""

    flavor: str = "auto"
    """torchforge's option, no effect: the sizes are those in the checkpoint's config.json."""

    hf_assets_path: str
    """Folder with config.json and tokenizer, or hf://ORG/NAME."""


@dataclass(kw_only=True)
class OptimizerConfig(Block):
    """Optimizer of the policy."""

    name: Literal["AdamW", "Adam"] = "AdamW"
    """Optimizer class."""

    lr: Positive = 1e-5
    """Learning rate after warm-up."""

    beta1: Share = 0.9
    """Decay of the first moment."""

    beta2: Share = 0.95
    """Decay of the second moment."""

    eps: Positive = 1e-8
    """Added to the denominator."""

    weight_decay: NotNegative = 0.1
    """Decoupled weight decay."""


@dataclass(kw_only=True)
class LRSchedulerConfig(Block):
    """Learning rate over steps."""

    warmup_steps: NaturalInt = 1
    """Steps of linear warm-up."""

    decay_ratio: Share | None = 0.0
    """Last share of the steps in which the rate decays. 0 holds it; null decays from warm-up on."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""

    min_lr_factor: Share = 0.0
    """Final rate as a share of `optimizer.lr`."""


@dataclass(kw_only=True)
class TrainingConfig(Block):
    """Batch, length and precision of training."""

    local_batch_size: PositiveInt = 8
    """Episodes per forward pass; a larger batch is done in several passes."""

    seq_len: PositiveInt = 2048
    """Longest sequence, prompt and response together."""

    max_norm: Positive = 1.0
    """Gradient clipping: largest global norm."""

    steps: PositiveInt = 1
    """Training steps of the run."""

    dtype: Literal["bfloat16", "float32"] = "float32"
    """Type of parameters, gradients and optimizer state."""

    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the parameters inside the forward pass."""

    gc_freq: PositiveInt = 50
    """Steps between two garbage collections. No effect on the reference model."""


@dataclass(kw_only=True)
class ParallelismConfig(Block):
    """How the model is spread over ranks. The degrees' product is the number of processes."""

    data_parallel_replicate_degree: PositiveInt = 1
    """Replicas of the weights."""

    data_parallel_shard_degree: int = 1
    """Shards of the weights (FSDP2). -1 takes all processes that the other degrees leave."""

    tensor_parallel_degree: PositiveInt = 1
    """Tensor parallelism."""

    pipeline_parallel_degree: PositiveInt = 1
    """Pipeline parallelism; only 1 is built."""

    context_parallel_degree: PositiveInt = 1
    """Context parallelism; only 1 is built."""

    expert_parallel_degree: PositiveInt = 1
    """Expert parallelism; only 1 is built."""

    disable_loss_parallel: bool = True
    """torchforge's option, no effect: logits are gathered before the loss, which needs them."""


@dataclass(kw_only=True)
class CheckpointConfig(Block):
    """Saving and resuming, and where the initial weights come from."""

    enable: bool = True
    """Save and resume. Off, only the initial weights are loaded."""

    folder: str = "checkpoint"
    """Where checkpoints go; relative to the run's folder. A run resumes from the newest in it."""

    interval: PositiveInt = 500
    """Steps between two checkpoints."""

    keep_latest_k: NaturalInt = 2
    """Checkpoints kept; 0 keeps all."""

    initial_load_path: str | None = None
    """Initial weights: a HF checkpoint folder or hf://ORG/NAME. Ignored when resuming."""

    initial_load_in_hf: bool = True
    """torchforge's option; initial weights are read in HF's format only, so only true is good."""

    last_save_in_hf: bool = True
    """Write the last checkpoint in HF's format as well."""

    async_mode: Literal["disabled"] = "disabled"
    """torchforge's option; checkpoints are written between two steps, never in the background."""


@dataclass(kw_only=True)
class ActivationCheckpointConfig(Block):
    """Recompute activations in the backward pass instead of keeping them."""

    mode: Literal["none", "selective", "full"] = "none"
    """Which activations to recompute."""

    selective_ac_option: Literal["op"] = "op"
    """For `selective`: which policy of torchtitan; it has one."""


@dataclass(kw_only=True)
class CompileConfig(Block):
    """torch.compile of the trained model."""

    enable: bool = False
    """Compile the model and the loss."""


@dataclass(kw_only=True)
class TrainerConfig(Block):
    """The policy's trainer."""

    model: ModelConfig
    """Which model."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Its optimizer."""

    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    """Its learning rate over time."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Batch, length, precision, steps."""

    compile: CompileConfig = field(default_factory=CompileConfig)
    """torch.compile."""

    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """Spread over ranks."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints and initial weights."""

    activation_checkpoint: ActivationCheckpointConfig = field(
        default_factory=ActivationCheckpointConfig
    )
    """Recomputation of activations."""

    push_rounding: PushRounding = "auto"
    """How fp32 weights become the bf16 that is pushed and exported. `nearest` gives updates smaller
    than the spacing of bf16 back as if nothing was learnt; `stochastic` keeps them on average, by
    one fixed draw per weight. `auto`: nearest where `training.mixed_precision_param` is bfloat16,
    whose forward pass then has these very weights, else stochastic. No effect where
    `training.dtype` is bfloat16."""


def rounding_problem(trainer: TrainerConfig) -> str:
    """What contradicts `push_rounding`; empty if nothing does."""
    if trainer.push_rounding == "stochastic" and trainer.training.dtype == "bfloat16":
        return (
            "got stochastic, expected auto or nearest: weights of trainer.training.dtype bfloat16 "
            "are not rounded"
        )
    return ""


@dataclass(kw_only=True)
class RefModelConfig(Block):
    """The frozen reference policy for the KL term of the loss."""

    model: ModelConfig
    """Which model; usually the trainer's."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Only `seq_len` and `dtype` matter here."""

    compile: CompileConfig = field(default_factory=CompileConfig)
    """torch.compile."""

    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """Spread over ranks."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Where its weights come from; only `initial_load_path` matters here."""

    temperature: Positive = 1.0
    """Divides its logits; loss.temperature."""
