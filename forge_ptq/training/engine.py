"""The trainer without its actor: model, optimizer, schedule, step, checkpoint.

`TitanTrainer` wraps it as an actor; warm-up and tests call it directly.

    engine = TrainEngine(config, loss=GRPOLoss(), rank=0, world_size=1)
    engine.resume()
    metrics = engine.step(inputs, targets)
    engine.save()
"""

from __future__ import annotations

import gc
import inspect
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge_ptq.config.titan import TrainerConfig
from forge_ptq.loss import LossOutput
from forge_ptq.models import checkpoint

from . import checkpoints, distributed, packing, titan
from .optimizer import build_lr_scheduler, build_optimizer

log = logging.getLogger(__name__)

Batch = dict[str, Any]


def response_logits(
    built: titan.BuiltModel, tokens: Tensor, prompt_lens: Tensor, response_len: int
) -> Tensor:
    """[B, R, V] logits that score each response token.

    `tokens` [B, request_len + R] is padded on the left, `prompt_lens` [B] counts prompt tokens.
    The output head runs on response positions only, where it is not sharded by tensor parallelism.
    """
    request_len = tokens.shape[1] - response_len
    packed = packing.pack(tokens, prompt_lens, request_len)
    if packed.shape[1] > built.seq_len:
        raise ValueError(
            f"training.seq_len: {built.seq_len}; this batch has sequences of {packed.shape[1]}"
        )
    index = packing.response_index(prompt_lens, response_len)
    if built.parallel_dims is not None and built.parallel_dims.tp > 1:
        logits = built.model(packed)
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        return packing.take(logits, index)

    def only_responses(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (packing.take(args[0], index),)

    head: Any = built.model.lm_head
    hook = head.register_forward_pre_hook(only_responses)
    try:
        return built.model(packed)
    finally:
        hook.remove()


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
        self.save_error = ""
        """Why the last checkpoint that was due could not be saved; empty if it was."""
        accepted = inspect.signature(loss).parameters
        self._takes = None if _takes_anything(accepted) else set(accepted)

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
        self.model.train()
        learning_rate = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        rank = self.built.dp_rank
        loss, sums, maxima = self._forward_backward(inputs[rank], targets[rank])
        norm = self._clip()
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
            **_means(sums),
            **maxima,
        }
        metrics["seconds"] = time.perf_counter() - started
        return metrics

    def _forward_backward(
        self, inputs: Batch, targets: Batch
    ) -> tuple[float, dict[str, float], dict[str, float]]:
        """Accumulates gradients over micro-batches; loss, sums and maxima over all ranks."""
        device = titan.device_type()
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        targets = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in targets.items()}
        tokens, targets = packing.trim(inputs["tokens"], targets)
        response_len = targets["response"].shape[1]
        prompt_lens = inputs.get("prompt_lens")
        if prompt_lens is None:
            request_len = tokens.shape[1] - response_len
            prompt_lens = packing.prompt_lengths(tokens, request_len, self.built.pad_id)
        weigh = getattr(self.loss, "weight", None)
        share = weigh(targets["padding_mask"]) if weigh else float(len(tokens))
        denominator = distributed.sum_over_ranks({"share": share})["share"]

        total = 0.0
        sums: dict[str, float] = defaultdict(float)
        maxima: dict[str, float] = defaultdict(float)
        for part in self._micro_batches(len(tokens)):
            logits = response_logits(self.built, tokens[part], prompt_lens[part], response_len)
            kwargs = {k: v[part] if isinstance(v, Tensor) else v for k, v in targets.items()}
            if weigh:
                output = self.loss(logits, **kwargs, denominator=denominator)
            else:
                output = self._plain_loss(logits, kwargs, (part.stop - part.start) / denominator)
            output.loss.backward()
            total += float(output.loss.detach())
            for name, value in output.sums.items():
                sums[name] += float(value)
            for name, value in output.maxima.items():
                maxima[name] = max(maxima[name], float(value))
        return (
            distributed.sum_over_ranks({"loss": total})["loss"],
            distributed.sum_over_ranks(dict(sums)),
            distributed.max_over_ranks(dict(maxima)),
        )

    def _plain_loss(self, logits: Tensor, targets: Batch, share: float) -> LossOutput:
        """A loss in torchforge's form, a function that returns the mean over its batch."""
        takes = self._takes
        kept = {k: v for k, v in targets.items() if takes is None or k in takes}
        result = self.loss(logits, **kept)
        if isinstance(result, LossOutput):
            return result._replace(loss=result.loss * share)
        tokens = targets["padding_mask"].sum().float()
        return LossOutput(result * share, {"tokens": tokens}, {})

    def _micro_batches(self, batch: int) -> Iterator[slice]:
        size = self.config.training.local_batch_size
        return (slice(i, min(i + size, batch)) for i in range(0, batch, size))

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
        """Weights under HF names, cast to `dtype`: copies where that changes the type."""
        return {k: v.to(dtype) for k, v in self.built.hf_state().items()}

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

        A save that fails does not end the training: `save_error` says why, the next one is due
        after the next interval.
        """
        config = self.config.checkpoint
        last = self.step_count == self.config.training.steps
        if not config.enable or not (last or self.step_count % config.interval == 0):
            return None
        self.save_error, saved = "", None
        if last and config.last_save_in_hf:
            try:
                self.export(self._folder / "hf")
            except (OSError, SafetensorError) as error:
                self.save_error = f"{self._folder / 'hf'}: {error}"
        try:
            saved = self.save()
        except checkpoints.SaveError as error:
            self.save_error = str(error)
        if self.save_error:
            log.error("step %d is not saved: %s", self.step_count, self.save_error)
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


def _takes_anything(parameters: Any) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _means(sums: dict[str, float]) -> dict[str, float]:
    """Sums over tokens to means over tokens; `tokens` stays a count."""
    tokens = max(sums.get("tokens", 0.0), 1.0)
    names = {"ratio": "ratio_mean"}
    means = {names.get(k, k): v / tokens for k, v in sums.items() if k != "tokens"}
    return {"tokens": sums.get("tokens", 0.0), **means}
