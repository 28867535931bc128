"""Quantize a checkpoint once, outside of any run: the numerics of a publish in one process.

    job = Job(model=..., data=..., out=..., budget=0.03)
    inputs = check(job)              # everything that can be wrong with what was asked, in seconds
    result = quantize(job, inputs)   # observe, smooth, observe, plan, quantize, measure, write

The result is a compressed-tensors checkpoint (``forge_ptq.compressed``) with a manifest and the
record of its calibration. Rollouts are split by prompt: most calibrate, a quarter decides the plan
if there is a budget, and a quarter is touched by neither and gives the rise that is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge_ptq.artifact import CalibrationRecord, Manifest, QuantizedArtifact
from forge_ptq.models.checkpoint import fingerprint, iter_tensors, write_folder
from forge_ptq.offline_job import Inputs, Job, JobError, check
from forge_ptq.services.sampler import Rollout

if TYPE_CHECKING:
    import torch

    from forge_ptq.numerics.calibration import Calibration
    from forge_ptq.numerics.stats import ActivationStats
    from forge_ptq.services.policy_copy import PolicyCopy

    Shift = dict[str, torch.Tensor]
    Stats = dict[str, ActivationStats]

__all__ = ["Inputs", "Job", "JobError", "Measured", "Result", "WriteError", "check", "quantize"]

PLAN_RESPONSE_TOKENS = 32
"""First tokens of each response that plans are measured on: many rollouts beat long ones."""


class WriteError(OSError):
    """The result could not be written; the message says where and why."""


Report = Callable[[str, int, int], None]
"""Called with (stage, done, total) as the work goes on."""


@dataclass(frozen=True)
class Measured:
    """Perplexity rise of the result on rollouts that nothing was chosen on."""

    rise: float
    ci: tuple[float, float]
    """95 %, clustered by rollout."""
    tokens: int


@dataclass(frozen=True)
class Result:
    """What was written."""

    folder: Path
    manifest: Manifest
    measured: Measured | None
    """None with fewer than four prompts."""

    @property
    def within_budget(self) -> bool:
        """Whether the planner found a plan within the budget; True without one."""
        record = self.manifest.calibration
        if record is None or record.budget is None or record.predicted_rise is None:
            return True
        return record.predicted_rise <= record.budget


def quantize(job: Job, inputs: Inputs, report: Report = lambda *_: None) -> Result:
    """Do it. The folder appears at once and complete, or not at all.

    Raises QuantizationError for weights or activations that are not finite, OSError, and WriteError
    where the folder cannot be written, with nothing left behind.
    """
    from forge_ptq.services.policy_copy import PolicyCopy, build_model

    report("load", 0, 1)
    policy = PolicyCopy(build_model(job.model), job.plan)
    policy.load(job.version, dict(iter_tensors(job.model)))
    report("load", 1, 1)
    calibration = _calibrate(job, policy, inputs, report)
    layers = policy.layers if calibration is None else dict(calibration.layers)
    report("quantize", 0, 1)
    tensors, used, notes = policy.quantize(layers, calibration)
    report("quantize", 1, 1)
    measured = _measure(policy, used, calibration, inputs.held_out, report)
    artifact = QuantizedArtifact.build(
        policy_version=job.version,
        model=policy.architecture,
        layers=used,
        asked=layers,
        notes=notes,
        tensors=tensors,
        calibration=_record(job, calibration, measured),
    )
    folder = _write(job, artifact, report)
    return Result(folder, artifact.manifest, measured)


def _calibrate(job: Job, policy: PolicyCopy, inputs: Inputs, report: Report) -> Calibration | None:
    """What a calibration round of the services does, in one process; None if nothing needs it."""
    from forge_ptq.numerics.calibration import Calibration
    from forge_ptq.services.planning import choose_plan
    from forge_ptq.services.policy_batches import shortened
    from forge_ptq.services.work import Plan

    schemes = set(policy.layers.values())
    smoothed = job.smoothing and schemes != {"bf16"}
    if job.budget is None and "int8_static" not in schemes and not smoothed:
        return None
    shift, alpha, stats = _observe(job, policy, inputs.calibration, report)
    plan = Plan(
        version=job.version,
        round=0,
        pass_=0,
        shift=shift,
        method=job.range,
        percentile=job.percentile,
        auto=job.budget is not None,
        budget=job.budget or 0.0,
        max_evaluations=job.max_evaluations,
        rollouts=shortened(inputs.plan, PLAN_RESPONSE_TOKENS),
    )
    planned = choose_plan(
        policy, plan, stats, lambda done: report("plan", done, job.max_evaluations)
    )
    return Calibration(
        round=0,
        policy_version=job.version,
        layers=planned.layers,
        absmax=planned.absmax,
        shift=shift,
        stats=stats,
        tokens=sum(len(rollout.token_ids) for rollout in inputs.calibration),
        contributors=("offline",),
        predicted_rise=planned.predicted_rise,
        alpha=alpha,
        range_method=job.range,
        budget=job.budget,
    )


def _observe(
    job: Job, policy: PolicyCopy, rollouts: list[Rollout], report: Report
) -> tuple[Shift, dict[str, float], Stats]:
    """(shift, alpha, statistics of the smoothed inputs)."""
    from forge_ptq.numerics.schemes import QuantizationError
    from forge_ptq.services.policy_batches import make_batches

    batches = make_batches(rollouts, job.batch_tokens)

    def observe(stage: str, shift: Shift | None = None) -> Stats:
        report(stage, 0, len(batches))
        stats = policy.observe(
            batches, shift, on_batch=lambda done: report(stage, done, len(batches))
        )
        for site, seen in stats.items():
            if seen.non_finite:
                raise QuantizationError(
                    f"{site}: {seen.non_finite} values of its input are NaN or infinite"
                )
        return stats

    stats = observe("observe")
    if not job.smoothing:
        return {}, {}, stats
    shift, alpha = policy.smooth(stats, job.alpha, down_proj=job.down_proj)
    return shift, alpha, observe("observe smoothed", shift) if shift else stats


def _measure(
    policy: PolicyCopy,
    layers: Mapping[str, str],
    calibration: Calibration | None,
    held_out: list[Rollout],
    report: Report,
) -> Measured | None:
    from forge_ptq.numerics.divergence import compare

    if not held_out:
        return None
    report("measure", 0, 1)
    shift = {} if calibration is None else calibration.shift
    ranges = {} if calibration is None else calibration.absmax
    scores = policy.evaluator(held_out, shift).scores(layers, ranges)
    result = compare(scores.logprobs_GR, scores.reference_GR, scores.kl_GR)
    report("measure", 1, 1)
    tokens = sum(len(kl_R) for kl_R in scores.kl_GR)
    return Measured(result.perplexity_rise, result.ci, tokens)


def _record(
    job: Job, calibration: Calibration | None, measured: Measured | None
) -> CalibrationRecord | None:
    """Without a calibration one of 0 tokens that keeps the measured rise; None without either."""
    if calibration is None:
        if measured is None:
            return None
        return CalibrationRecord(0, job.version, tokens=0, measured_rise=measured.rise)
    return CalibrationRecord.of(calibration, None if measured is None else measured.rise)


def _write(job: Job, artifact: QuantizedArtifact, report: Report) -> Path:
    from safetensors import SafetensorError

    from forge_ptq.compressed import save_compressed

    report("write", 0, 1)
    artifact_id = artifact.manifest.artifact_id
    info = {"fingerprint": fingerprint({"artifact_id": artifact_id}), "artifact_id": artifact_id}
    try:
        folder = write_folder(
            job.out, lambda path: save_compressed(artifact, job.model, path), info
        )
    except (OSError, SafetensorError) as error:
        raise WriteError(f"--out: {job.out} could not be written: {error}") from error
    report("write", 1, 1)
    return folder
