"""`ProcessAgent`: the runtime's own actor in every spawned process.

It tells the process' identity and hands over the metrics that were recorded there.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
from typing import Any

import monarch.actor
from monarch.actor import Actor, current_rank, endpoint

from forge_ptq.runtime.own.death import ProcessId
from forge_ptq.runtime.own.metrics import COLLECTOR


class RankEnvironment(Actor):
    """Sets torch.distributed's variables in the processes of a mesh (see shims.py)."""

    @endpoint
    async def apply(self, master_addr: str | None, master_port: int | None) -> None:
        """RANK, LOCAL_RANK and WORLD_SIZE of this process; master address and port if given."""
        point = current_rank()
        per_host = point.extent[point.extent.labels[-1]]
        variables = {
            "RANK": point.rank,
            "LOCAL_RANK": point.rank % per_host,
            "WORLD_SIZE": math.prod(point.extent.sizes),
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": master_port,
        }
        os.environ.update({k: str(v) for k, v in variables.items() if v is not None})


class ProcessAgent(Actor):
    """First actor of a process. Sets up logging; endpoints for the provisioner and the metrics."""

    def __init__(self, mesh_name: str) -> None:
        self.process_name = f"{mesh_name}_r{current_rank().rank}"
        monarch.actor.config.prefix_python_logs_with_actor = False  # our format says who it is
        handler = logging.StreamHandler(sys.stdout)
        line = f"[{self.process_name}] %(asctime)s %(levelname)s %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(line))
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(logging.INFO)

    @endpoint
    async def describe(self) -> tuple[ProcessId, str]:
        """Identity of this process, and its host's name."""
        return ProcessId.of(os.getpid()), socket.gethostname()

    @endpoint
    async def set_environment(self, env: dict[str, str]) -> None:
        """Adds to this process' environment what was not known before it started."""
        os.environ.update(env)

    @endpoint
    async def collect(self, acknowledged: int, keep_raw: bool) -> dict[str, Any]:
        """Metrics recorded here since the last acknowledged collection (see MetricCollector)."""
        return {"process": self.process_name, **COLLECTOR.collect(acknowledged, keep_raw)}
