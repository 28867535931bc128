"""The one seam to TorchForge: real torchforge where it is installed, else our own runtime.

Everything else in the project imports actors, services and metrics from here only.
`FORGE_PTQ_RUNTIME=own|torchforge` forces the choice. See own/__init__.py and torchforge.py.
"""

from __future__ import annotations

from forge_ptq.runtime.own import (
    ActorDied,
    Completion,
    ForgeActor,
    Launcher,
    LauncherConfig,
    Metric,
    ProcessConfig,
    ProvisionerConfig,
    QueueFull,
    Reduce,
    ReplayBuffer,
    RequestTimeout,
    ServiceConfig,
    ServiceInterface,
    ServiceUnavailable,
    Session,
    Tracer,
    concurrent_endpoint,
    current_rank,
    current_size,
    endpoint,
    get_or_create_metric_logger,
    get_proc_mesh,
    init_provisioner,
    pids,
    record_metric,
    run,
    shutdown,
)

FORGE_INSTALLED = False
"""Whether real torchforge serves this process."""

__all__ = [
    "FORGE_INSTALLED",
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
    "pids",
    "record_metric",
    "run",
    "shutdown",
]
