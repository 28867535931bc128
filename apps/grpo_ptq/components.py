"""Everything that one GRPO run spawns, started side by side."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from forge_ptq import runtime, store
from forge_ptq.config import RunConfig, to_plain
from forge_ptq.engine.generator import QuantizedGenerator
from forge_ptq.guard_state import GuardState
from forge_ptq.loss import GRPOLoss
from forge_ptq.observe.report import RunReport
from forge_ptq.observe.summary import write_json
from forge_ptq.services.coordinator import Coordinator
from forge_ptq.services.merger import StatsMerger
from forge_ptq.services.ptq import PTQ
from forge_ptq.services.quantizer import Quantizer
from forge_ptq.services.replicas import call_all, live_artifact
from forge_ptq.training.reference_model import ReferenceModel
from forge_ptq.training.trainer import TitanTrainer

from .episodes import collate
from .saving import restore
from .tasks import ComputeAdvantages, DatasetActor, RewardActor

log = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 20.0
"""For each part that closes in order."""


@dataclass
class Components:
    """Handles of the actors and services of one run."""

    dataset: Any
    policy: Any
    rewards: Any
    advantages: Any
    ref_model: Any
    replay_buffer: Any
    trainer: Any
    metric_logger: Any
    quantizer: Any = None
    stats_merger: Any = None
    coordinator: Any = None
    ptq: PTQ | None = None

    async def train_step(self, inputs: Any, targets: Any, reward: float) -> dict[str, float]:
        """One step on every rank; the metrics are over all ranks and equal on each. A checkpoint
        made after it remembers the dataset's position and the batch's mean reward."""
        extra = {"position": await self.dataset.position.call_one(), "reward": reward}
        return _first(await self.trainer.train_step.call(inputs, targets, extra))

    async def sequence_mismatch(self) -> list[dict[str, float]]:
        """Of each sequence of the last step, in the order of the inputs (mismatch.COLUMNS)."""
        return _first(await self.trainer.sequence_mismatch.call())

    async def resume_step(self) -> int:
        """Steps that the trainer's checkpoint holds."""
        return _first(await self.trainer.resume_step.call())

    async def resume_extra(self) -> dict[str, Any]:
        """`position`: questions that had been handed out when the checkpoint was made; `reward`."""
        return _first(await self.trainer.resume_extra.call())

    async def serve_unquantized(self, version: int) -> None:
        """The pushed bf16 weights straight into the generator, when there is no PTQ to gate."""
        results = await self.policy.update_weights.fanout(version)
        if all(result is None for result in results):  # each died under the call
            raise RuntimeError(f"no generator replica took version {version}")
        for old in await store.weight_versions():
            if old < version:
                await store.drop_weights(old)

    async def serving(self) -> dict[str, Any]:
        """`committed`: the artifact that should serve; `live`: those that the generators serve.
        Where one does not answer: `error`."""
        try:
            committed = await store.get_committed()
            found = await call_all(self.policy, "describe", deadline_s=DESCRIBE_TIMEOUT_S)
        except (RuntimeError, TimeoutError) as error:
            log.warning("what serves is not known", exc_info=True)
            return {"error": f"{type(error).__name__}: {error}"}
        return {
            "committed": committed.artifact_id if committed else None,
            "live": [live_artifact(description) for description in found if description],
        }

    async def pids(self) -> dict[str, list[int]]:
        """Process ids by component, for operators and for tests that kill them."""
        others = ("ptq", "metric_logger")
        handles = {k: v for k, v in vars(self).items() if k not in others and v is not None}
        return {name: await runtime.pids(handle) for name, handle in handles.items()}

    async def close(self) -> None:
        """Ends what must end in order: publishes, metrics, the store. Processes end afterwards.
        Never raises: a run that fails has a cause worth telling, which this must not replace."""
        parts = {"metrics": self.metric_logger.shutdown.call_one, "store": store.shutdown}
        if self.ptq is not None:
            parts = {"ptq": self.ptq.close, **parts}
        for name, close in parts.items():
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await close()
            except Exception:
                log.exception("closing %s failed; its processes are ended all the same", name)


def _first(results: Any) -> Any:
    """Rank 0's entry of a ValueMesh."""
    return next(iter(results.values()))


def admission(cfg: RunConfig) -> dict[str, Any]:
    """Which prompts the generator answers in full precision, as its constructor takes it."""
    ab, load = cfg.ptq.ab, cfg.ptq.precision_by_load
    if not cfg.ptq.enabled:
        return {"mode": "off"}
    if ab.enabled:
        return {"mode": "ab", "fraction": ab.fraction}
    if load.enabled:
        return {
            "mode": "load",
            "bf16_below": load.bf16_below,
            "int8_above": load.int8_above,
        }
    return {"mode": "off"}


async def launch(cfg: RunConfig, report: RunReport) -> Components:
    """Spawns and sets up all components. Raises what the first failing one raises."""
    plain = to_plain(cfg)
    actors, services = plain["actors"], plain["services"]
    plain["trainer"]["checkpoint"]["folder"] = str(
        report.run_dir.checkpoint(cfg.trainer.checkpoint.folder)
    )
    await runtime.init_provisioner(provisioner_config(cfg))
    metric_logger = await runtime.get_or_create_metric_logger(process_name="Controller")
    with report.phase("start/store"):
        await store.initialize()
    restored = await restore(cfg, report)

    async def started(name: str, spawning: Any) -> Any:
        with report.phase(f"start/{name}"):
            handle = await spawning
        report.note(f"{name} is up")
        return handle

    spawning = {
        "dataset": DatasetActor.options(**actors["dataset"]).as_actor(
            **plain["dataset"], max_tokens=cfg.max_req_tokens
        ),
        "policy": QuantizedGenerator.options(**services["policy"]).as_service(
            # Its own plan counts only without PTQ: then the generator quantizes nothing.
            **plain["policy"],
            plan={"default": "bf16"},
            admission=admission(cfg),
        ),
        "rewards": RewardActor.options(**services["reward_actor"]).as_service(**plain["reward"]),
        "advantages": ComputeAdvantages.options(**actors["compute_advantages"]).as_actor(
            **plain["advantages"]
        ),
        "ref_model": ReferenceModel.options(**services["ref_model"]).as_service(
            **plain["ref_model"]
        ),
        "replay_buffer": runtime.ReplayBuffer.options(**actors["replay_buffer"]).as_actor(
            **plain["replay_buffer"], collate=collate
        ),
        "trainer": TitanTrainer.options(**actors["trainer"]).as_actor(
            **plain["trainer"], loss=GRPOLoss(**plain["loss"])
        ),
    }
    if cfg.ptq.enabled:
        spawning |= {
            "quantizer": Quantizer.options(**services["quantizer"]).as_service(
                model_path=cfg.model,
                plan={key: plain["ptq"]["plan"][key] for key in ("default", "overrides")},
            ),
            "stats_merger": StatsMerger.options(**services["stats_merger"]).as_service(),
            "coordinator": Coordinator.options(**actors["coordinator"]).as_actor(),
        }
    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(started(name, s)) for name, s in spawning.items()}
    forge = Components(
        **{name: task.result() for name, task in tasks.items()}, metric_logger=metric_logger
    )
    if cfg.ptq.enabled:
        forge.ptq = await publisher(cfg, forge, report, restored)
    await metric_logger.init_backends.call_one(backends(cfg, report))
    await watch(forge, report)
    return forge


async def publisher(
    cfg: RunConfig, forge: Components, report: RunReport, restored: GuardState | None
) -> PTQ:
    """PTQ with what an earlier session remembered; without it, and an event, if that is of another
    version of the code. What was restored into the store counts either way."""
    launched = partial(
        PTQ.launch,
        cfg.ptq,
        policy=forge.policy,
        quantizer=forge.quantizer,
        merger=forge.stats_merger,
        coordinator=forge.coordinator,
        inject=cfg.debug.inject,
    )
    if restored is not None:
        try:
            return await launched(state=restored.publisher)
        except ValueError as error:
            report.add_event("checkpoint", f"what the guard remembered is not used: {error}")
    return await launched()


async def watch(forge: Components, report: RunReport) -> None:
    """Keeps pids.json in the run's folder true, and tells of every replica that came back."""

    async def write_pids() -> None:
        try:
            write_json(report.run_dir.path / "pids.json", await forge.pids())
        except OSError as error:
            report.add_event("disk", f"pids.json is not up to date: {error}")

    def on_respawn(name: str) -> Any:
        async def respawned(replica: int, actor: Any) -> None:
            del actor
            report.add_event("respawn", f"{name} died and was respawned (replica {replica})")
            await write_pids()

        return respawned

    for name in ("policy", "rewards", "ref_model", "quantizer", "stats_merger"):
        service = getattr(forge, name)
        if service is not None:
            service.on_respawn(on_respawn(name))
    await write_pids()


def provisioner_config(cfg: RunConfig) -> runtime.ProvisionerConfig | None:
    """The scheduler that hands out hosts; None for this machine alone."""
    if cfg.provisioner is None:
        return None
    launcher = runtime.LauncherConfig(
        launcher=cfg.provisioner.launcher, job_name=cfg.provisioner.job_name
    )
    return runtime.ProvisionerConfig(launcher_config=launcher)


def backends(cfg: RunConfig, report: RunReport) -> dict[str, Any]:
    """The `metric_logging` block for the metric logger. The console is the report's."""
    wandb = cfg.metric_logging.wandb
    if wandb is None:
        return {}
    folder = report.run_dir
    settings = to_plain(wandb)
    settings["name"] = wandb.name or folder.name
    # One id per run folder, so that a resumed run goes on in the same W&B run.
    settings["id"] = wandb.id or re.sub(r"[^A-Za-z0-9_.-]", "-", folder.name)
    settings["resume"] = wandb.resume or "allow"
    settings["dir"] = str(folder.path)
    settings["config"] = to_plain(cfg)
    return {"wandb": settings}
