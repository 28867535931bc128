"""The seam to real torchforge: its actors, services, provisioner and metrics, with our manners.

What is torchforge's stays torchforge's: placement, routing, retries, respawns, replay buffer,
accumulation of metrics. What the seam adds, so that the project need not know which runtime it has:

- options that only we know (`env`, `colocate`, deadlines, queue bounds, ...) are honoured here;
- every process starts through own/child.py: environment before imports, log file, no Ctrl-C;
- an endpoint's exception reaches the caller as it is (torchforge's services return it as a result);
  a missing replica is waited for, then ServiceUnavailable; RequestTimeout, QueueFull, ActorDied;
- shutdown leaves no process behind.

One difference remains: torchforge restarts a replica whose endpoint raised.
Imported only after shims.install(); see forge_ptq/runtime/__init__.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Coroutine
from typing import Any

from forge import types as forge_types
from forge.actors.replay_buffer import ReplayBuffer as TorchforgeReplayBuffer
from forge.controller import provisioner as forge_provisioner
from forge.controller.service import SessionContext as Session
from forge.data_models.completion import Completion
from forge.observability import Metric, Reduce, Tracer, record_metric

from forge_ptq.runtime.own import client
from forge_ptq.runtime.own.handle import ActorHandle
from forge_ptq.runtime.own.provisioner import SHUTDOWN_TIMEOUT_S
from forge_ptq.runtime.own.start import start_monarch
from forge_ptq.runtime.own.types import (
    Launcher,
    LauncherConfig,
    ProcessConfig,
    ProvisionerConfig,
    ServiceConfig,
)
from forge_ptq.runtime.torchforge import processes
from forge_ptq.runtime.torchforge.actor import ForgeActor
from forge_ptq.runtime.torchforge.metrics import get_or_create_metric_logger
from forge_ptq.runtime.torchforge.service import ServiceInterface

NAME = "torchforge"

for _name in list(logging.root.manager.loggerDict):
    if _name.startswith("forge."):  # its modules set themselves to DEBUG
        logging.getLogger(_name).setLevel(logging.INFO)


class ReplayBuffer(ForgeActor, TorchforgeReplayBuffer):
    """torchforge's replay buffer, spawned through our ForgeActor."""


def _to_forge(cfg: ProcessConfig | ServiceConfig, kind: type) -> Any:
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: getattr(cfg, name) for name in names})


def _to_forge_launcher(cfg: LauncherConfig) -> Any:
    return forge_types.LauncherConfig(
        launcher=cfg.launcher.value if isinstance(cfg.launcher, Launcher) else cfg.launcher,
        job_name=cfg.job_name,
        services={k: _to_forge(v, forge_types.ServiceConfig) for k, v in cfg.services.items()},
        actors={k: _to_forge(v, forge_types.ProcessConfig) for k, v in cfg.actors.items()},
    )


async def init_provisioner(cfg: ProvisionerConfig | None = None) -> Any:
    """torchforge's provisioner; launcher `local` is its default (no launcher)."""
    start_monarch()
    if cfg is None or cfg.launcher_config.launcher is Launcher.LOCAL:
        return await forge_provisioner.init_provisioner(None)
    launcher = _to_forge_launcher(cfg.launcher_config)
    return await forge_provisioner.init_provisioner(forge_types.ProvisionerConfig(launcher))


async def get_proc_mesh(process_config: ProcessConfig) -> Any:
    """A Monarch ProcMesh placed as configured; it ends at shutdown()."""
    return (await processes.acquire(process_config)).proc_mesh


async def pids(handle: Any) -> list[int]:
    """Pids of the processes behind an actor handle or a service, replicas and ranks in order."""
    if isinstance(handle, ActorHandle):
        return list(handle.processes.pids)
    return list(handle.pids())


async def kill_local(handle: Any) -> None:
    """SIGKILL to the processes behind an actor handle or a service that run on this machine, for
    one that hangs; a service then brings fresh ones."""
    one = isinstance(handle, ActorHandle)
    for actor in [handle] if one else [replica.actor for replica in handle._service._replicas]:
        if isinstance(actor, ActorHandle):
            actor.processes.kill()


async def shutdown() -> None:
    """torchforge's shutdown within a deadline, then the end of every process that is left."""
    if forge_provisioner._provisioner is None:
        return
    try:
        await asyncio.wait_for(forge_provisioner.shutdown(), SHUTDOWN_TIMEOUT_S)
        await processes.release_all()
    finally:
        processes.kill_all()
        forge_provisioner._provisioner = None


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """The whole life of a client: `sys.exit(run(main()))`. See own.client.run."""
    return client.run(main, shutdown, processes.kill_all)


__all__ = [
    "NAME",
    "Completion",
    "ForgeActor",
    "Metric",
    "Reduce",
    "ReplayBuffer",
    "ServiceInterface",
    "Session",
    "Tracer",
    "get_or_create_metric_logger",
    "get_proc_mesh",
    "init_provisioner",
    "kill_local",
    "pids",
    "record_metric",
    "run",
    "shutdown",
]
