"""The one seam to TorchForge: real torchforge where it is installed, else our own runtime.

Everything else in the project imports actors, services and metrics from here only.
`FORGE_PTQ_RUNTIME=own|torchforge` forces the choice. See own/__init__.py and torchforge.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from types import ModuleType

from forge_ptq.runtime import shims
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
    kill_local,
    pids,
    record_metric,
    run,
    shutdown,
)

CHOICE = "FORGE_PTQ_RUNTIME"


def _installed(name: str) -> bool:
    """Whether a module can be found; its parent packages are imported, itself not."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _torchforge() -> ModuleType | None:
    """The seam to torchforge, if it is to be used. Raises ValueError for an unknown choice.

    Forced (`torchforge`), an import that fails raises; else the own runtime is used and a warning
    says why.
    """
    choice = os.environ.get(CHOICE, "")
    if choice not in ("", "own", "torchforge"):
        raise ValueError(f"{CHOICE} = {choice!r}: expected own or torchforge")
    if choice == "own" or (not choice and not _installed("forge.controller")):
        return None
    shims.install()
    try:
        return importlib.import_module("forge_ptq.runtime.torchforge")
    except ImportError as error:
        if choice:
            raise
        logging.getLogger(__name__).warning(
            "torchforge is installed but cannot be imported (%s): using our own runtime", error
        )
        return None


_seam = _torchforge()
FORGE_INSTALLED = _seam is not None
"""Whether real torchforge serves this process."""
if _seam is not None:
    globals().update({name: getattr(_seam, name) for name in _seam.__all__ if name != "NAME"})

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
    "kill_local",
    "pids",
    "record_metric",
    "run",
    "shutdown",
]
