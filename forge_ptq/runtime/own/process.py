"""`ProcessGroup`: one spawned Monarch mesh of processes, from start to certain end."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import HostMesh

from forge_ptq.runtime.own import child
from forge_ptq.runtime.own.agent import ProcessAgent
from forge_ptq.runtime.own.handle import ProcessRef
from forge_ptq.runtime.own.types import ProcessConfig

log = logging.getLogger(__name__)

LOG_DIR = "FORGE_PTQ_LOG_DIR"
STOP_TIMEOUT_S = 3.0
"""How long a mesh may take to stop in order before its processes are killed."""
_POLL_S = 0.02


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("localhost", 0))
        return int(sock.getsockname()[1])


def _log_file(mesh_name: str) -> str:
    folder = os.environ.get(LOG_DIR, "")
    return str(Path(folder).resolve() / f"{mesh_name}.log") if folder else ""


def bootstrap_command(
    name: str, procs: int, env: Mapping[str, str]
) -> Callable[[Any], BootstrapCommand]:
    """For Monarch's spawn_procs: starts child.py with `env`, log file, and torch's rank variables.

    `procs` is the number of processes per host.
    """
    port = str(_free_port())

    def command(point: Any) -> BootstrapCommand:
        variables = {
            "RANK": str(point.rank),
            "LOCAL_RANK": str(point.rank % procs),
            "WORLD_SIZE": str(math.prod(point.extent.sizes)),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
            child.LOG_FILE: _log_file(name),
            **env,
        }
        # -P: the folder of child.py must not come first on sys.path (it has a types.py).
        return BootstrapCommand(sys.executable, None, ["-P", child.__file__], variables)

    return command


class ProcessGroup:
    """A mesh of `procs` processes per host, its agent actors, and the resources it holds."""

    def __init__(self, name: str, cfg: ProcessConfig, host_mesh: HostMesh, local: bool) -> None:
        self.name = name
        self.cfg = cfg
        self.host_mesh = host_mesh
        self.local = local
        self.gpu_ids: list[int] = []
        self.users = 0
        self.ref = ProcessRef(name, (), ())
        self.mesh: Any = None
        self.agents: Any = None

    async def start(self, timeout_s: float) -> None:
        """Starts the processes; returns when all of them answer. Kills them if one does not."""
        env = dict(self.cfg.env)
        if self.cfg.with_gpus and self.gpu_ids:
            env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpu_ids)), **env}
        self.mesh = self.host_mesh.spawn_procs(
            per_host={"procs": self.cfg.procs},
            name=self.name,
            bootstrap_command=bootstrap_command(self.name, self.cfg.procs, env),
        )
        self.agents = self.mesh.spawn("agent", ProcessAgent, self.name)

        async def describe() -> Any:
            return await self.agents.describe.call()

        try:
            answers = await asyncio.wait_for(describe(), timeout_s)
        except BaseException:
            await self.stop(STOP_TIMEOUT_S)
            raise
        identities = [identity for _, (identity, _) in answers.items()]
        hosts = [host for _, (_, host) in answers.items()]
        if not self.local:
            await asyncio.wait_for(self._set_master(hosts[0]), timeout_s)
        pids = tuple(identity.pid for identity in identities)
        self.ref = ProcessRef(self.name, pids, tuple(identities) if self.local else ())
        log.debug("started %s: pids %s", self.name, pids)

    async def _set_master(self, host: str) -> None:
        await self.agents.set_environment.call({"MASTER_ADDR": host})

    def alive(self) -> bool:
        """False once one of the local processes is known to be dead."""
        return self.ref.dead_pid() is None

    def agent(self, rank: int) -> Any:
        """Agent actor of one rank."""
        per_host = {"hosts": rank // self.cfg.procs} if "hosts" in self.agents.extent else {}
        return self.agents.slice(procs=rank % self.cfg.procs, **per_host)

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stops the processes in order; those still alive after `timeout_s` are killed."""
        if self.mesh is None:
            return

        async def in_order() -> None:
            await self.mesh.stop()

        if self.alive():
            try:
                await asyncio.wait_for(in_order(), timeout_s)
                if await self._gone(timeout_s):
                    return
            except TimeoutError:
                log.warning("%s did not stop within %g s; killing it", self.name, timeout_s)
            except RuntimeError as error:
                log.warning("%s did not stop in order (%s); killing it", self.name, error)
        self.ref.kill()
        if not await self._gone(STOP_TIMEOUT_S):
            raise RuntimeError(f"processes {self.ref.pids} of {self.name} survive SIGKILL")

    async def _gone(self, timeout_s: float) -> bool:
        for _ in range(1 + round(timeout_s / _POLL_S)):
            if not self.ref.any_alive():
                return True
            await asyncio.sleep(_POLL_S)
        return False
