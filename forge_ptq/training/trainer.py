"""`TitanTrainer`: the trainer as an actor, with torchforge's constructor and endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forge_ptq.config.loss import LossConfig
from forge_ptq.config.titan import (
    PUSH_ROUNDINGS,
    ActivationCheckpointConfig,
    CheckpointConfig,
    CompileConfig,
    LRSchedulerConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    PushRounding,
    TrainerConfig,
    TrainingConfig,
    rounding_problem,
)
from forge_ptq.loss import GRPOLoss
from forge_ptq.mismatch import MAXIMA
from forge_ptq.runtime import ForgeActor, Reduce, endpoint, record_metric

PUSH_TIMEOUT_S = 600.0
"""Longest time for one version's weights to reach the store."""


def block(kind: type, value: Any, name: str) -> Any:
    """A configuration block from a mapping or from itself. TypeError names the block."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: {type(value).__name__}; expected a mapping or {kind.__name__}")
    try:
        return kind(**value)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from error


@dataclass
class TitanTrainer(ForgeActor):
    """Trains the policy with torchtitan. Spawn it as an actor with one process per rank:

        trainer = await TitanTrainer.options(procs=1).as_actor(**cfg.trainer, loss=cfg.loss)
        start = await trainer.resume_step.call_one()
        metrics = await trainer.train_step.call(inputs, targets)     # every rank, dp-split lists
        rows = await trainer.sequence_mismatch.call_one()            # of that step's sequences
        await trainer.push_weights.call(version)                     # HF names, bf16, to the store

    Checkpoints: `checkpoint.interval` steps apart and after the last step, written inside
    train_step (checkpoints.py); setup() resumes from the newest complete one. A step with a
    non-finite loss or gradient changes nothing and reports `skipped`.
    """

    model: Any
    optimizer: Any = field(default_factory=dict)
    lr_scheduler: Any = field(default_factory=dict)
    training: Any = field(default_factory=dict)
    parallelism: Any = field(default_factory=dict)
    checkpoint: Any = field(default_factory=dict)
    activation_checkpoint: Any = field(default_factory=dict)
    compile: Any = field(default_factory=dict)
    push_rounding: PushRounding = "auto"
    loss: Any = field(default_factory=GRPOLoss)
    """A GRPOLoss, its fields as a mapping or `loss` block, or a function in torchforge's form:
    loss(logits, **targets)."""

    def __post_init__(self) -> None:
        super().__init__()
        blocks = {
            "model": ModelConfig,
            "optimizer": OptimizerConfig,
            "lr_scheduler": LRSchedulerConfig,
            "training": TrainingConfig,
            "parallelism": ParallelismConfig,
            "checkpoint": CheckpointConfig,
            "activation_checkpoint": ActivationCheckpointConfig,
            "compile": CompileConfig,
        }
        made = {n: block(kind, getattr(self, n), f"trainer.{n}") for n, kind in blocks.items()}
        if self.push_rounding not in PUSH_ROUNDINGS:
            raise ValueError(
                f"trainer.push_rounding: {self.push_rounding!r}; "
                f"expected one of {', '.join(PUSH_ROUNDINGS)}"
            )
        self.config = TrainerConfig(**made, push_rounding=self.push_rounding)
        if message := rounding_problem(self.config):
            raise ValueError(f"trainer.push_rounding: {message}")
        if isinstance(self.loss, Mapping) or type(self.loss) is LossConfig:
            self.loss = block(GRPOLoss, dict(**self.loss), "loss")

    @endpoint
    async def setup(self) -> None:
        """Builds the model, joins the other ranks, resumes."""
        from .engine import TrainEngine

        self.engine = TrainEngine(self.config, self.loss, rank=self._rank, world_size=self._size)
        self.engine.resume()

    @endpoint
    async def train_step(
        self,
        inputs: list[dict[str, Any]],
        targets: list[dict[str, Any]],
        extra: dict[str, Any] | None = None,
    ) -> dict[str, float]:
        """One step; each list has one entry per data-parallel rank (see apps' `collate`).

        `extra` is the application's own state (JSON) to keep in a checkpoint made after this step.
        Returns numbers over all ranks: loss, policy_loss, grad_norm, kl_ref, entropy, logprob,
        ratio_capped, clipped, tokens, skipped, learning_rate, step, seconds, and where the loss
        compares with the generator those of `mismatch.reduce`. They go to the metric logger too;
        where `inputs` has "schemes" and "policy_versions", one entry per sequence, along with the
        same within each scheme and age of the policy (rl_trainer/mismatch_k3/int8_static).
        """
        if extra is not None:
            self.engine.extra = extra
        metrics = self.engine.step(inputs, targets)
        if self._rank == 0:
            _record(metrics)
        started = time.perf_counter()
        if self.engine.save_if_due() is not None and self._rank == 0:
            record_metric("rl_trainer/save_s", time.perf_counter() - started, Reduce.MEAN)
        return {name: value for name, value in metrics.items() if "/" not in name}

    @endpoint
    async def sequence_mismatch(self) -> list[dict[str, float]]:
        """Of each sequence of the last step, over all ranks in the order of the inputs: a value for
        each of mismatch.COLUMNS. Every rank returns the same. Empty before the first step, and
        where the loss does not compare with the generator."""
        return self.engine.sequences

    @endpoint
    async def push_weights(self, policy_version: int) -> None:
        """Puts the weights into the store as `policy_version`: HF names, DTensor shards, bf16
        rounded as `push_rounding` says."""
        from forge_ptq import store

        started = time.perf_counter()
        state = self.engine.hf_state()
        await asyncio.wait_for(store.put_weights(policy_version, state), PUSH_TIMEOUT_S)
        if self._rank == 0:
            record_metric("rl_trainer/push_weights_s", time.perf_counter() - started, Reduce.MEAN)

    @endpoint
    async def save(self, extra: dict[str, Any] | None = None) -> int:
        """Writes a checkpoint now, due or not; returns its step."""
        if extra is not None:
            self.engine.extra = extra
        self.engine.save()
        return self.engine.step_count

    @endpoint
    async def save_errors(self) -> tuple[str, str]:
        """Of the last checkpoint that was due: why it could not be saved, and what failed beside
        it (see TrainEngine.left_undone); empty for what went well."""
        return self.engine.save_error, self.engine.left_undone

    @endpoint
    async def resume_step(self) -> int:
        """Steps done so far: 0 in a fresh run, the checkpoint's in a resumed one."""
        return self.engine.step_count

    @endpoint
    async def resume_extra(self) -> dict[str, Any]:
        """The application's state from the checkpoint resumed from; empty in a fresh run."""
        return self.engine.extra

    @endpoint
    async def cleanup(self) -> None:
        """Leaves the process group. Safe to call twice."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def _record(metrics: dict[str, float]) -> None:
    """Metrics of a step under stable names."""
    for name, value in metrics.items():
        if name == "loss":
            record_metric("rl_trainer/avg_loss", value, Reduce.MEAN)
        elif name in {"tokens", "skipped"}:
            record_metric(f"rl_trainer/{name}", value, Reduce.SUM)
        elif name.partition("/")[0] in {"step", "skipped_total", *MAXIMA}:
            record_metric(f"rl_trainer/{name}", value, Reduce.MAX)
        else:
            record_metric(f"rl_trainer/{name}", value, Reduce.MEAN)
