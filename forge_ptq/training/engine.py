"""The trainer without its actor: model, optimizer, schedule, step, checkpoint.

`TitanTrainer` wraps it as an actor; warm-up and tests call it directly.

    engine = TrainEngine(config, loss=GRPOLoss(), rank=0, world_size=1)
    engine.resume()
    metrics = engine.step(inputs, targets)
    engine.save()
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge_ptq import mismatch
from forge_ptq.config.titan import TrainerConfig
from forge_ptq.models import checkpoint

from . import checkpoints, distributed, titan
from .backward import Batch, backward
from .optimizer import build_lr_scheduler, build_optimizer

log = logging.getLogger(__name__)


class TrainEngine:
    """Trains one policy. Every rank of the process group owns one and calls it in step."""

    def __init__(
        self,
        config: TrainerConfig,
        loss: Callable[..., Any],
        *,
        rank: int = 0,
        world_size: int = 1,
        load_weights: bool = True,
        seed: int = 0,
    ) -> None:
        distributed.init_process_group(rank, world_size)
        self.config, self.loss, self.rank = config, loss, rank
        source = config.checkpoint.initial_load_path or config.model.hf_assets_path
        self.assets = checkpoint.local_folder(source)
        self.built = titan.build(
            self.assets,
            seq_len=config.training.seq_len,
            dtype=config.training.dtype,
            mixed_precision_param=config.training.mixed_precision_param,
            parallelism=config.parallelism,
            activation_checkpoint=config.activation_checkpoint,
            compile_config=config.compile,
            world_size=world_size,
            load_weights=load_weights,
            seed=seed,
        )
        self.model = self.built.model
        self.optimizers = build_optimizer(self.model, config.optimizer)
        self.lr_schedulers = build_lr_scheduler(
            self.optimizers, config.lr_scheduler, config.training.steps
        )
        self.step_count = 0
        """Training steps done, skipped ones included."""
        self.skipped = 0
        """Steps whose loss or gradient was not finite."""
        self.extra: dict[str, Any] = {}
        """The application's own state, kept in checkpoints."""
        self.sequences: list[dict[str, float]] = []
        """Mismatch of each sequence of the last step, over all data-parallel ranks in the order of
        the inputs: a value for each of mismatch.COLUMNS. Empty where the loss compares nothing."""
        self.save_error = ""
        """Why the last checkpoint that was due could not be saved; empty if it was."""
        self.left_undone = ""
        """What failed beside it: the HF format, LATEST, removing old ones; empty if nothing did."""

    # ---- training ----

    def step(self, inputs: list[Batch], targets: list[Batch]) -> dict[str, float]:
        """One optimizer step on this rank's share, in micro-batches of training.local_batch_size.

        A step whose loss or gradient is not finite changes no weight; it is counted and reported as
        `skipped`. All ranks agree on that. Returns metrics of the whole step over all ranks.
        """
        started = time.perf_counter()
        if len(inputs) != self.built.dp_size or len(targets) != self.built.dp_size:
            raise ValueError(
                f"got {len(inputs)} inputs and {len(targets)} targets; expected one of each per "
                f"data-parallel rank ({self.built.dp_size})"
            )
        size = self.config.training.local_batch_size
        counts = [-(-len(part["tokens"]) // size) for part in inputs]
        if len(set(counts)) > 1:  # the ranks' collectives would wait for each other
            raise ValueError(
                f"training.local_batch_size: {size} cuts the data-parallel ranks' inputs into "
                f"{counts} micro-batches; expected as many on each"
            )
        self.model.train()
        learning_rate = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        rank = self.built.dp_rank
        done = backward(self.built, self.loss, inputs[rank], targets[rank], size)
        self.sequences = self._gather(done.rows, inputs)
        norm, loss = self._clip(), done.loss
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self.optimizers.step()
        else:
            self.skipped += 1
        self.optimizers.zero_grad()
        self.lr_schedulers.step()
        self.step_count += 1
        if self.config.training.gc_freq and self.step_count % self.config.training.gc_freq == 0:
            gc.collect(1)
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "skipped": float(not finite),
            "skipped_total": float(self.skipped),
            "step": float(self.step_count),
            **_means(done.sums),
            **done.maxima,
            **_mismatch(self.sequences, inputs, self.step_count - 1),
        }
        metrics["seconds"] = time.perf_counter() - started
        return metrics

    def _gather(self, rows: Tensor | None, inputs: list[Batch]) -> list[dict[str, float]]:
        if rows is None:
            return []
        sizes = [len(part["tokens"]) for part in inputs]
        return mismatch.as_rows(distributed.gather_rows(rows, sizes, self.built.dp_rank))

    def _clip(self) -> float:
        """Clips the gradients to training.max_norm; returns their norm before, over all ranks."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads, foreach=True)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        value = float(norm)
        if math.isfinite(value):
            torch.nn.utils.clip_grads_with_norm_(
                self.model.parameters(), self.config.training.max_norm, norm, foreach=True
            )
        return value

    # ---- weights and checkpoints ----

    def hf_state(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """Weights under HF names, cast to `dtype`: copies where that changes the type. fp32 becomes
        bf16 as push_rounding says."""
        state = self.built.hf_state()
        if dtype == torch.bfloat16 and self.rounds_stochastically:
            return {k: distributed.stochastic_bf16(v, k) for k, v in state.items()}
        return {k: v.to(dtype) for k, v in state.items()}

    @property
    def rounds_stochastically(self) -> bool:
        """Whether fp32 weights are pushed with stochastic rounding."""
        training, how = self.config.training, self.config.push_rounding
        if training.dtype != "float32":
            return False  # they are bf16 already
        return how == "stochastic" or (
            how == "auto" and training.mixed_precision_param == "float32"
        )

    def full_hf_state(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """The same as whole CPU tensors; all ranks call it together."""
        state = self.hf_state(dtype)
        whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}
        return {k: v.cpu() for k, v in whole.items()}

    @property
    def _folder(self) -> Path:
        return Path(self.config.checkpoint.folder)

    def _tensors(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizers.state_dict(),
            "lr_scheduler": self.lr_schedulers.state_dict(),
        }

    def save(self) -> Path:
        """Writes a checkpoint of the current step; returns its folder."""
        state = {"skipped": self.skipped, "extra": self.extra}
        keep = self.config.checkpoint.keep_latest_k
        return checkpoints.save(self._folder, self.step_count, self._tensors(), state, keep)

    def save_if_due(self) -> Path | None:
        """Saves every checkpoint.interval steps and after the last one; HF format then too.

        What fails does not end the training, the next save is due after the next interval:
        `save_error` says why the step is not saved, `left_undone` what failed beside it.
        """
        config = self.config.checkpoint
        last = self.step_count == self.config.training.steps
        if not config.enable or not (last or self.step_count % config.interval == 0):
            return None
        self.save_error, undone, saved = "", [], None
        if last and config.last_save_in_hf:
            try:
                self.export(self._folder / "hf")
            except (OSError, SafetensorError) as error:
                undone.append(f"{self._folder / 'hf'}: {error}")
        try:
            saved = self.save()
        except checkpoints.TidyError as error:
            saved = checkpoints.path_of(self._folder, self.step_count)
            undone.append(str(error))
        except checkpoints.SaveError as error:
            self.save_error = str(error)
            log.error("step %d is not saved: %s", self.step_count, error)
        self.left_undone = "; ".join(undone)
        if undone:
            log.error("left undone after step %d: %s", self.step_count, self.left_undone)
        return saved

    def export(self, target: str | Path) -> None:
        """Writes a HF checkpoint folder in bf16: config, tokenizer, weights. All ranks call it."""
        state = self.full_hf_state()
        if self.rank == 0:
            assets, info = self.assets, {"fingerprint": f"step-{self.step_count}"}

            def fill(folder: Path) -> None:
                checkpoint.copy_assets(assets, folder)
                checkpoint.save_tensors(folder, state)

            checkpoint.write_folder(target, fill, info)

    def resume(self) -> int:
        """Loads the newest complete checkpoint, if there is one; returns the step to go on from."""
        config = self.config.checkpoint
        steps = checkpoints.complete_steps(self._folder) if config.enable else []
        if not steps:
            return 0
        tensors = self._tensors()
        state = checkpoints.load(self._folder, steps[-1], tensors)
        self.model.load_state_dict(tensors["model"])
        self.optimizers.load_state_dict(tensors["optimizer"])
        self.lr_schedulers.load_state_dict(tensors["lr_scheduler"])
        self.step_count, self.skipped = int(state["step"]), int(state["skipped"])
        self.extra = dict(state["extra"])
        return self.step_count


def _means(sums: dict[str, float]) -> dict[str, float]:
    """Sums over tokens to means over tokens; `tokens` stays a count."""
    tokens = max(sums.get("tokens", 0.0), 1.0)
    means = {k: v / tokens for k, v in sums.items() if k != "tokens"}
    return {"tokens": sums.get("tokens", 0.0), **means}


def _mismatch(
    rows: list[dict[str, float]], inputs: list[Batch], trained_version: int
) -> dict[str, float]:
    """Numbers of the step's mismatch; by scheme and age too, where the inputs tell those."""
    if not rows:
        return {}
    schemes, versions = (
        [value for part in inputs for value in part[key]]
        if all(key in part for part in inputs)
        else None
        for key in ("schemes", "policy_versions")
    )
    ages = None if versions is None else [trained_version - int(v) for v in versions]
    return {**mismatch.reduce(rows), **mismatch.split(rows, schemes, ages)}
