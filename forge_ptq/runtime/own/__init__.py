"""Our own runtime on Monarch 0.7, with torchforge's API.

A file per concern. Processes: child (their first code), death (notices their end), agent (our actor
in each), process, gpus, launcher, provisioner, start (Monarch's client), client (start to clean
exit). Calls: actor, handle, router, replica, service, interface. Metrics: metrics, metric_logger,
backends, tracer. And types (configuration, errors), replay_buffer, completion.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from monarch.actor import concurrent_endpoint, current_rank, current_size, endpoint

from forge_ptq.runtime.own import client
from forge_ptq.runtime.own.actor import ForgeActor
from forge_ptq.runtime.own.completion import Completion
from forge_ptq.runtime.own.interface import ServiceInterface, Session
from forge_ptq.runtime.own.metric_logger import close_metric_logger, get_or_create_metric_logger
from forge_ptq.runtime.own.metrics import Metric, Reduce, record_metric
from forge_ptq.runtime.own.provisioner import (
    current_provisioner,
    forget_provisioner,
    get_proc_mesh,
    init_provisioner,
    kill_local,
    pids,
)
from forge_ptq.runtime.own.replay_buffer import ReplayBuffer
from forge_ptq.runtime.own.tracer import Tracer
from forge_ptq.runtime.own.types import (
    ActorDied,
    Launcher,
    LauncherConfig,
    ProcessConfig,
    ProvisionerConfig,
    QueueFull,
    RequestTimeout,
    ServiceConfig,
    ServiceUnavailable,
)

NAME = "own"


async def shutdown() -> None:
    """Closes the metric backends and ends every process this client started. May be repeated."""
    provisioner = current_provisioner()
    try:
        await close_metric_logger()
    finally:
        if provisioner is not None:
            await provisioner.shutdown()
            forget_provisioner()


def kill_all() -> None:
    """SIGKILL to every local process that this client started."""
    provisioner = current_provisioner()
    if provisioner is not None:
        provisioner.kill_all()


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """The whole life of a client: `sys.exit(run(main()))`. See client.run."""
    return client.run(main, shutdown, kill_all)


__all__ = [
    "NAME",
    "ActorDied",
    "Completion",
    "ForgeActor",
    "Launcher",
    "LauncherConfig",
    "Metric",
    "ProcessConfig",
    "ProvisionerConfig",
    "QueueFull",
    "Reduce",
    "ReplayBuffer",
    "RequestTimeout",
    "ServiceConfig",
    "ServiceInterface",
    "ServiceUnavailable",
    "Session",
    "Tracer",
    "concurrent_endpoint",
    "current_rank",
    "current_size",
    "endpoint",
    "get_or_create_metric_logger",
    "get_proc_mesh",
    "init_provisioner",
    "kill_local",
    "pids",
    "record_metric",
    "run",
    "shutdown",
]
