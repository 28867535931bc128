"""What ``forge-ptq quantize`` is asked to do, and the checks before it starts."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_ptq.models.checkpoint import COMPLETE, read_config, require_replaceable
from forge_ptq.models.headers import tensor_shapes
from forge_ptq.numerics.plan import MODEL_TYPES, QuantPlan
from forge_ptq.rollouts_file import read_rollouts, split
from forge_ptq.services.sampler import Rollout

MARGIN_BYTES = 64 << 20
"""Disk space wanted beyond the size of the source checkpoint."""


class JobError(ValueError):
    """Something that was asked cannot be done; the message names the option."""


@dataclass(frozen=True)
class Job:
    """What to quantize, and how."""

    model: Path
    """Folder of a full-precision HF checkpoint."""
    data: Path
    """Rollouts, see ``rollouts_file``."""
    out: Path
    """Folder to write, new or empty."""
    default: str = "int8_dynamic"
    """Scheme of layers that no override names; no effect with a budget."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    budget: float | None = None
    """Perplexity rise that an automatic plan may cost; None: the plan is default and overrides."""
    range: str = "absmax"
    percentile: float = 99.99
    smoothing: bool = True
    alpha: float | None = None
    """Smoothing strength; None: chosen per site."""
    down_proj: bool = True
    """Smooth down_proj too, by half a power at most."""
    batch_tokens: int = 4096
    max_evaluations: int = 24
    version: int = 0
    """Policy version written into the manifest."""
    force: bool = False
    """Replace a checkpoint that was made here."""

    @property
    def plan(self) -> QuantPlan:
        """The plan as asked."""
        return QuantPlan.from_config(self.default, self.overrides)


@dataclass(frozen=True)
class Inputs:
    """What ``check`` read."""

    calibration: list[Rollout]
    plan: list[Rollout]
    held_out: list[Rollout]
    """Empty with fewer than four prompts."""


def check(job: Job) -> Inputs:
    """Read the rollouts, and refuse in seconds what would fail after minutes.

    Raises JobError, RolloutFileError or PlanError.
    """
    try:
        config = read_config(job.model)
    except (OSError, ValueError) as error:
        raise JobError(f"--model: {error}") from error
    if "quantization_config" in config:
        raise JobError(f"--model: {job.model} is quantized already, expected full precision")
    files = list(job.model.glob("*.safetensors"))
    if not files:
        raise JobError(f"--model: no *.safetensors file in {job.model}")
    _check_numbers(job)
    _check_out(job, sum(file.stat().st_size for file in files))
    _check_model(job, config)
    text = {**config, **config.get("text_config", {})}
    if not isinstance(text.get("vocab_size"), int):
        raise JobError(f"--model: {job.model}/config.json has no vocab_size")
    rollouts = read_rollouts(
        job.data,
        vocab_size=text["vocab_size"],
        max_tokens=int(text.get("max_position_embeddings", 1 << 30)),
    )
    calibration, plan, held_out = split(rollouts, plan=job.budget is not None)
    if job.budget is not None and not plan:
        raise JobError(
            "--budget: an automatic plan needs rollouts of at least 4 prompts, "
            f"{job.data} has {len({rollout.group for rollout in rollouts})}"
        )
    return Inputs(calibration, plan, held_out)


def _check_numbers(job: Job) -> None:
    bounds = {
        "--budget": (job.budget, 0.0, float("inf")),
        "--percentile": (job.percentile, 0.0, 100.0),
        "--alpha": (job.alpha, -1e-9, 1.0),
        "--batch-tokens": (job.batch_tokens, 0, float("inf")),
        "--max-evaluations": (job.max_evaluations, 2, float("inf")),
        "--policy-version": (job.version, -1, 1e10 - 1),
    }
    for option, (value, low, high) in bounds.items():
        if value is None or (math.isfinite(value) and low < value <= high):
            continue
        most = f", at most {high:g}" if math.isfinite(high) else " and finite"
        raise JobError(f"{option}: got {value}, expected more than {low:g}{most}")
    if job.alpha is not None and not job.smoothing:
        raise JobError("--alpha: contradicts --no-smoothing, it is the strength of the smoothing")


def _check_out(job: Job, wanted: int) -> None:
    try:
        out = job.out.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise JobError(f"--out: {error}") from error
    if out == job.model.resolve() or out in job.model.resolve().parents:
        raise JobError(f"--out: {job.out} is or holds the model itself")
    if job.out.exists():
        if not job.out.is_dir():
            raise JobError(f"--out: {job.out} is a file")
        if any(job.out.iterdir()) and not job.force:
            hint = "; --force replaces it" if (job.out / COMPLETE).is_file() else ""
            raise JobError(f"--out: {job.out} is not empty{hint}")
        try:
            require_replaceable(job.out)
        except FileExistsError as error:
            raise JobError(f"--out: {error}") from error
        if os.path.ismount(out):
            raise JobError(f"--out: {job.out} is a mount point, expected a folder below it")
    parent = out.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise JobError(f"--out: {parent} is a file")
    if not os.access(parent, os.W_OK):
        raise JobError(f"--out: {parent} is not writable")
    free = shutil.disk_usage(parent).free
    if free < wanted + MARGIN_BYTES:
        raise JobError(
            f"--out: {parent} has {free / 1e9:.2f} GB free, up to "
            f"{(wanted + MARGIN_BYTES) / 1e9:.2f} GB may be needed"
        )


def _check_model(job: Job, config: Mapping[str, Any]) -> None:
    """Architecture, names and shapes of the tensors, and the plan, on a model without memory."""
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    from forge_ptq.services.policy_load import Intake

    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        name = (config.get("architectures") or ["its architecture"])[0]
        raise JobError(
            f"--model: {name} (model_type {kind!r}) is not supported, expected one of "
            f"{', '.join(sorted(MODEL_TYPES))}"
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(job.model)))
    except Exception as error:  # of any kind: transformers computes with what the file says
        raise JobError(
            f"--model: transformers cannot make a model of {job.model}/config.json: "
            f"{type(error).__name__}: {error}"
        ) from error
    try:
        Intake(model).slices(job.version, tensor_shapes(job.model))
    except ValueError as error:
        what = str(error).removeprefix(f"policy version {job.version}: ")
        raise JobError(f"--model: {what}") from error
    job.plan.resolve(n for n, m in model.named_modules() if isinstance(m, nn.Linear))
