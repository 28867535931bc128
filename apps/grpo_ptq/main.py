"""GRPO whose rollouts run quantized.

    python -m apps.grpo_ptq.main --config configs/tiny_cpu.yaml [key.path=value ...]

Two loops run side by side. *Rollouts*: a prompt, `group_size` responses of the generator (INT8),
rewards, group advantages, reference log-probabilities, into the replay buffer. *Training*: a batch
from the buffer, one optimizer step, the new weights into TorchStore, and `ptq.publish(version)`,
which quantizes them, stages them beside the serving slot, probes them and, if they pass the gate,
flips to them. With `off_by_n: 0` rollouts wait for each publish; otherwise rollouts, the publish
and the next training step overlap, and an episode may trail the trainer by `off_by_n` versions.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from typing import Any

from .entry import leave, quiet_interrupts, run_app

if __name__ == "__main__":
    quiet_interrupts()  # the imports below take seconds

import torch

from forge_ptq.config import RunConfig
from forge_ptq.observe.report import RunReport
from forge_ptq.runtime import Completion, Reduce, record_metric

from .alarms import sound_alarms
from .components import Components, launch
from .episodes import Episode, Group, mismatch_records
from .pacing import RolloutBudget, oldest_usable
from .saving import Saving

BUFFER_POLL_S = 0.02
PUBLISH_ATTEMPTS = 3
PUBLISH_PAUSE_S = 2.0


async def main(cfg: RunConfig, report: RunReport) -> None:
    """One run, from start to the last training step. Raises the first failure of any part."""
    forge = await launch(cfg, report)
    saving = Saving(cfg, forge, report)
    try:
        start, served = await resume(cfg, forge, report)
        saving.resumed(start)
        budget = RolloutBudget(batch_episodes(cfg), cfg.off_by_n, start, served)
        async with asyncio.TaskGroup() as tasks:
            rollouts = [
                tasks.create_task(continuous_rollouts(cfg, forge, budget, report))
                for _ in range(cfg.rollout_threads)
            ]
            await continuous_training(cfg, forge, budget, report, saving, start, tasks)
            for task in rollouts:
                task.cancel()
    finally:
        try:
            await saving.close()
        finally:
            await forge.close()


def batch_episodes(cfg: RunConfig) -> int:
    """Episodes of one training step, over all data-parallel ranks."""
    return cfg.replay_buffer.batch_size * cfg.replay_buffer.dp_size


async def resume(cfg: RunConfig, forge: Components, report: RunReport) -> tuple[int, int]:
    """Training steps that a checkpoint already holds, and the version that the generator serves:
    the artifact that served before, if it was saved and is young enough (saving.py). If not, the
    checkpoint's weights in full precision, since nothing can be probed before there are rollouts.
    """
    step = await forge.resume_step()
    if not step:
        return 0, 0
    extra = await forge.resume_extra()
    report.restore(step, extra.get("reward"))
    if step >= cfg.trainer.training.steps:
        report.note(f"nothing to do: {step} of {cfg.trainer.training.steps} steps are done")
        return step, step
    report.note(f"resuming after step {step}")
    await forge.dataset.seek.call_one(int(extra.get("position", 0)))
    await forge.trainer.push_weights.call(step)
    if forge.ptq is not None and forge.ptq.served_version:
        served = forge.ptq.served_version
    else:
        served = await serve(cfg, forge, report, step, must_serve=True)
    report.serving(await forge.serving())
    return step, served


# ---- rollouts ---- #


async def continuous_rollouts(
    cfg: RunConfig, forge: Components, budget: RolloutBudget, report: RunReport
) -> None:
    """Keeps the replay buffer filled with groups of episodes, as far ahead as `budget` allows."""
    pad_id: int = await forge.dataset.pad_token.call_one()
    while True:
        await budget.acquire(cfg.group_size)
        kept = 0
        try:
            group = await rollout(cfg, forge, pad_id, report)
            for episode in group:
                await forge.replay_buffer.add.call_one(episode)
            kept = len(group)
            if forge.ptq is not None:
                await forge.ptq.offer(group)
        finally:
            await budget.delivered(cfg.group_size, kept)


async def rollout(cfg: RunConfig, forge: Components, pad_id: int, report: RunReport) -> Group:
    """One prompt, its responses, and all that training needs to know of them."""
    with report.phase("rollout/prompt"):
        sample = await forge.dataset.sample.call_one()
        prompt, target = sample["request"], sample["target"]

    with report.phase("rollout/generate"):
        completions: list[Completion] = await forge.policy.generate.route(prompt)
    group = [
        Episode(
            episode_id=str(uuid.uuid4()),
            pad_id=pad_id,
            request_len=cfg.max_req_tokens,
            response_len=cfg.max_res_tokens,
            target=target,
            completion=completion,
        )
        for completion in completions
    ]

    with report.phase("rollout/reward"):
        for episode, completion in zip(group, completions, strict=True):
            episode.reward = await forge.rewards.evaluate_response.route(
                prompt=prompt, response=completion.text, target=target
            )
        advantages = await forge.advantages.compute.call_one(group)

    with report.phase("rollout/reference"):
        input_ids = torch.stack([torch.cat([e.request_tensor, e.response_tensor]) for e in group])
        ref_logprobs = await forge.ref_model.forward.route(
            input_ids,
            cfg.max_req_tokens,
            return_logprobs=True,
            prompt_lens=torch.tensor([e.prompt_length for e in group]),
        )
    for episode, advantage, logprobs in zip(group, advantages, ref_logprobs, strict=True):
        episode.advantage, episode.ref_logprobs = advantage, logprobs

    tokens = sum(e.response_length for e in group)
    record_metric("main/rollout/response_tokens", tokens, Reduce.SUM)
    report.add_rollout(tokens=tokens, versions=[e.policy_version for e in group])
    return group


# ---- training ---- #


async def continuous_training(
    cfg: RunConfig,
    forge: Components,
    budget: RolloutBudget,
    report: RunReport,
    saving: Saving,
    step: int,
    tasks: asyncio.TaskGroup,
) -> None:
    """Trains until `trainer.training.steps`. New versions are published beside the next step; a
    publish that fails for good ends the run through `tasks`."""
    publishing: asyncio.Task[None] | None = None
    while step < cfg.trainer.training.steps:
        with report.phase("train/wait_for_rollouts"):
            inputs, targets = await next_batch(forge, budget, step)
        await budget.taken(batch_episodes(cfg))

        reward = mean_reward(inputs)
        with report.phase("train/step"):
            metrics = await forge.train_step(inputs, targets, reward)
        step += 1
        for text in sound_alarms(cfg, step, metrics):
            report.add_event("alarm", f"step {step}: {text}")
        await saving.trained(step)

        if publishing:
            with report.phase("train/wait_for_publish"):
                await publishing
        await watch(cfg, forge, budget, report, saving, inputs, step)
        await saving.guard(step)
        if step % cfg.ptq.publish_every == 0 or step == cfg.trainer.training.steps:
            with report.phase("train/push_weights"):
                await forge.trainer.push_weights.call(step)
            publishing = tasks.create_task(publish(cfg, forge, budget, report, saving, step))

        await end_step(forge, report, step, reward, metrics)
    if publishing:
        await publishing
        await forge.metric_logger.flush.call_one(step + 1)  # what the last publish recorded
    report.serving(await forge.serving())


async def next_batch(forge: Components, budget: RolloutBudget, step: int) -> Any:
    """Waits until the buffer holds a batch that is young enough for version `step`. Rollouts, which
    run beside it, have deadlines of their own; their failure ends the run."""
    while (batch := await forge.replay_buffer.sample.call_one(curr_policy_version=step)) is None:
        await budget.reclaim_evicted()
        await asyncio.sleep(BUFFER_POLL_S)
    return batch


async def publish(
    cfg: RunConfig,
    forge: Components,
    budget: RolloutBudget,
    report: RunReport,
    saving: Saving,
    version: int,
) -> None:
    """Offers `version` to the generator and lets rollouts on."""
    await budget.serves(await serve(cfg, forge, report, version))
    await saving.guard(version)


async def watch(
    cfg: RunConfig,
    forge: Components,
    budget: RolloutBudget,
    report: RunReport,
    saving: Saving,
    inputs: list[dict[str, Any]],
    step: int,
) -> None:
    """Shows the guard what training step `step` found in its rollouts. It may take back what
    serves."""
    if (ptq := forge.ptq) is None:
        return
    records = mismatch_records(inputs, await forge.sequence_mismatch(), step - 1)
    oldest = oldest_usable(step, cfg.trainer.training.steps, cfg.ptq.publish_every, cfg.off_by_n)
    before = len(ptq.ladder.condemned), ptq.serving.current
    try:
        with report.phase("train/watch"):
            rollback = await ptq.watch(step, records, oldest)
    finally:  # also where a cancellation came upon it
        if before != (len(ptq.ladder.condemned), ptq.serving.current):
            await saving.condemned()
    if rollback is not None:
        report.add_rollback(step, rollback)
        await budget.serves(ptq.served_version)


async def serve(
    cfg: RunConfig, forge: Components, report: RunReport, version: int, must_serve: bool = False
) -> int:
    """Offers `version` to the generator; returns the version that serves then. A refused candidate
    leaves the last good version serving, unless that would be too old to train on before the next
    publish: then (or with `must_serve`) the new version is served in full precision."""
    with report.phase("publish"):
        if forge.ptq is None:
            await forge.serve_unquantized(version)
            return version
        steps, every = cfg.trainer.training.steps, cfg.ptq.publish_every
        too_old = forge.ptq.served_version < oldest_usable(version, steps, every, cfg.off_by_n)
        for _ in range(PUBLISH_ATTEMPTS):
            verdict = await forge.ptq.publish(version, must_serve=too_old or must_serve)
            report.add_publish(verdict)
            if verdict.outcome != "kept" or not (too_old or must_serve):
                return forge.ptq.served_version
            await asyncio.sleep(PUBLISH_PAUSE_S)
    raise RuntimeError(
        f"version {version} could not be served in {PUBLISH_ATTEMPTS} attempts "
        f"({verdict.reason}) and version {forge.ptq.served_version} is too old to train on "
        f"with off_by_n = {cfg.off_by_n}"
    )


def mean_reward(inputs: list[dict[str, Any]]) -> float:
    """Mean reward of the episodes of one training step."""
    return float(torch.cat([rank["rewards"] for rank in inputs]).mean())


async def end_step(
    forge: Components, report: RunReport, step: int, reward: float, metrics: dict[str, float]
) -> None:
    """Metrics of all processes to W&B and the console, and the run's summary to its folder."""
    with report.phase("train/metrics"):
        reduced = await forge.metric_logger.flush.call_one(step)
    ages = {
        f"policy_age_{name}": reduced.get(f"buffer/sample/{metric}_sampled_policy_age", math.nan)
        for name, metric in (("mean", "avg"), ("max", "max"))
    }
    metrics = {f"train_{k}" if k == "tokens" else k: v for k, v in metrics.items() if k != "step"}
    report.end_step(step, reward, {**metrics, **ages})


if __name__ == "__main__":
    leave(run_app(main, __doc__ or ""))
