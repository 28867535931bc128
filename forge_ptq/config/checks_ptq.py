"""Keys of `ptq` that must fit each other and the rest. See checks.py."""

from __future__ import annotations

import math

from .build import Problems
from .calibration import LEAST_SHARE
from .schema import RunConfig

PROBE_MARGIN = 1.5
"""Expected rollouts per required one: with fewer, many candidates could not be judged, or scales
not be measured."""


def check_publishing(config: RunConfig, problems: Problems) -> None:
    """Publishing, the probe's supply of rollouts, and fault injection."""
    ptq = config.ptq
    probe, sampler = ptq.probe, ptq.sampler
    if ptq.publish_every > config.off_by_n + 1:
        # Rollouts of the served version would all be too old: training would wait for ever.
        message = f"got {ptq.publish_every}, expected at most off_by_n + 1 = {config.off_by_n + 1}"
        problems.append(("ptq.publish_every", message))
    if probe.min_sequences > probe.sequences:
        message = f"got {probe.min_sequences}, expected at most ptq.probe.sequences"
        problems.append(("ptq.probe.min_sequences", f"{message} = {probe.sequences}"))
    if int(sampler.capacity * sampler.probe_fraction) < probe.min_sequences:
        message = f"got {sampler.capacity}, expected room for ptq.probe.min_sequences"
        share = f"{probe.min_sequences} / {sampler.probe_fraction} or more"
        problems.append(("ptq.sampler.capacity", f"{message}: {share}"))
    episodes = config.local_batch_size * config.replay_buffer.dp_size
    supply = (sampler.max_age + 1) * episodes * sampler.probe_fraction
    if ptq.enabled and supply < PROBE_MARGIN * probe.min_sequences:
        message = (
            f"got {probe.min_sequences}, but the pool holds about {supply:g} for the probe: "
            f"(ptq.sampler.max_age + 1) * {episodes} episodes per step * ptq.sampler.probe_fraction"
            f"; expected at least {PROBE_MARGIN} times ptq.probe.min_sequences, since which "
            "rollouts are held out is left to chance"
        )
        problems.append(("ptq.probe.min_sequences", message))
    if probe.max_sequences < probe.sequences:
        message = f"got {probe.max_sequences}, expected at least ptq.probe.sequences"
        problems.append(("ptq.probe.max_sequences", f"{message} = {probe.sequences}"))
    _guard(config, problems)
    _inject(config, problems)


def _guard(config: RunConfig, problems: Problems) -> None:
    guard, ab, load = config.ptq.guard, config.ptq.ab, config.ptq.precision_by_load
    rungs = guard.on_reject
    if len(set(rungs)) != len(rungs) or "keep" in rungs[:-1]:
        message = f"got {rungs}, expected each of demote, bf16, keep at most once, keep last"
        problems.append(("ptq.guard.on_reject", message))
    if "demote" in rungs and "bf16" in rungs and rungs.index("demote") > rungs.index("bf16"):
        message = f"got {rungs}, expected demote before bf16, which nothing can be better than"
        problems.append(("ptq.guard.on_reject", message))
    if ab.enabled and load.enabled:
        message = "got true, expected false while ptq.ab.enabled: both need the idle slot"
        problems.append(("ptq.precision_by_load.enabled", message))
    for name, block in (("ab", ab), ("precision_by_load", load)):
        if block.enabled and not config.ptq.enabled:
            message = "got true, expected false while ptq.enabled is false"
            problems.append((f"ptq.{name}.enabled", message))
    if load.bf16_below >= load.int8_above:
        message = f"got {load.bf16_below}, expected less than ptq.precision_by_load.int8_above"
        problems.append(("ptq.precision_by_load.bf16_below", f"{message} = {load.int8_above}"))


def _inject(config: RunConfig, problems: Problems) -> None:
    ptq, steps = config.ptq, config.trainer.training.steps
    if config.debug.inject and not ptq.enabled:
        problems.append(("debug.inject", "expected [] while ptq.enabled is false"))
    versions = [inject.step for inject in config.debug.inject]
    for number, inject in enumerate(config.debug.inject):
        if inject.step > steps or inject.step % ptq.publish_every:
            message = f"got {inject.step}, expected a published step: a multiple of"
            where = f"debug.inject[{number}].step"
            problems.append((where, f"{message} ptq.publish_every up to {steps}"))
        if inject.step in versions[:number]:
            where = f"debug.inject[{number}].step"
            problems.append((where, f"got {inject.step} twice, expected one fault per version"))


def check_scales(config: RunConfig, problems: Problems) -> None:
    """Calibration, smoothing, merge and plan."""
    ptq = config.ptq
    if not ptq.enabled:
        return
    _plan(config, problems)
    _rounds(config, problems)
    sampler, plan = ptq.sampler, ptq.plan
    room = sampler.capacity - round(sampler.capacity * sampler.probe_fraction)
    need = ptq.calibration.rollouts + (plan.rollouts if plan.mode == "auto" else 0)
    if ptq.needs_calibration() and room < need:
        also = " + ptq.plan.rollouts" if plan.mode == "auto" else ""
        message = (
            f"got {sampler.capacity}, of which {room} are not held out for the probe; expected "
            f"room for ptq.calibration.rollouts{also} = {need}"
        )
        problems.append(("ptq.sampler.capacity", message))
    episodes = config.local_batch_size * config.replay_buffer.dp_size
    supply = (sampler.max_age + 1) * episodes * (1 - sampler.probe_fraction)
    if ptq.needs_calibration() and supply < PROBE_MARGIN * LEAST_SHARE * need:
        message = (
            f"got {ptq.calibration.rollouts}, but the pool holds about {supply:g} that are not for "
            f"the probe: (ptq.sampler.max_age + 1) * {episodes} episodes per step * (1 - "
            "ptq.sampler.probe_fraction); with ptq.plan.rollouts in mode auto expected at most "
            f"{supply / PROBE_MARGIN / LEAST_SHARE:g}, or nothing would ever be calibrated"
        )
        problems.append(("ptq.calibration.rollouts", message))
    longest = config.max_req_tokens + config.max_res_tokens
    tokens = math.floor(sampler.max_tokens * sampler.probe_fraction)
    if tokens < ptq.probe.min_sequences * longest:
        message = (
            f"got {sampler.max_tokens}, of which {tokens} are for the probe; expected room for "
            f"ptq.probe.min_sequences rollouts of {longest} tokens"
        )
        problems.append(("ptq.sampler.max_tokens", message))


def _plan(config: RunConfig, problems: Problems) -> None:
    ptq, plan = config.ptq, config.ptq.plan
    schemes = {plan.default, *plan.overrides.values()}
    if plan.mode == "auto":
        if plan.max_evaluations < 3:
            message = f"got {plan.max_evaluations}, expected 3 or more for ptq.plan.mode auto"
            problems.append(("ptq.plan.max_evaluations", message))
        if plan.budget >= ptq.guard.max_perplexity_rise:
            message = f"got {plan.budget}, expected less than ptq.guard.max_perplexity_rise"
            more = "a plan at the limit is refused as often as not"
            limit = ptq.guard.max_perplexity_rise
            problems.append(("ptq.plan.budget", f"{message} = {limit}: {more}"))
    elif ptq.smoothing.enabled and schemes == {"bf16"}:
        message = "got true, expected false: ptq.plan has no INT8 layer to smooth for"
        problems.append(("ptq.smoothing.enabled", message))


def _rounds(config: RunConfig, problems: Problems) -> None:
    merge, limits = config.ptq.merge, config.ptq.deadlines
    if merge.heartbeat_s >= merge.deadline_s:
        message = f"got {merge.heartbeat_s:g}, expected less than ptq.merge.deadline_s"
        more = "a share must change hands before the round is over"
        problems.append(("ptq.merge.heartbeat_s", f"{message} = {merge.deadline_s:g}: {more}"))
    steps = 6 if config.ptq.smoothing.enabled else 3
    if steps * merge.deadline_s > limits.calibrate_s:
        message = f"got {limits.calibrate_s:g}, expected at least {steps} * ptq.merge.deadline_s"
        parts = (
            "observe, merge, smooth, observe, merge, plan" if steps == 6 else "observe, merge, plan"
        )
        least = steps * merge.deadline_s
        problems.append(("ptq.deadlines.calibrate_s", f"{message} = {least:g}: {parts}"))
    replicas, oversample = config.services.quantizer.num_replicas, config.ptq.calibration.oversample
    primaries = max(1, math.floor(replicas / oversample))
    if replicas > 1 and 2 * primaries < replicas:
        message = (
            f"got {oversample:g}, by which {replicas - primaries} of the {replicas} replicas of "
            "services.quantizer would stand by; expected half of them at most"
        )
        problems.append(("ptq.calibration.oversample", message))
