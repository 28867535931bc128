"""Where host meshes come from: this machine, or a scheduler's job through Monarch."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from monarch.actor import HostMesh, enable_transport

from forge_ptq.runtime.own.types import Launcher, LauncherConfig

SLURM_ARGS = (
    "account",
    "cpus_per_task",
    "exclusive",
    "gpus_per_node",
    "job_start_timeout",
    "log_dir",
    "mem",
    "monarch_port",
    "partition",
    "python_exe",
    "qos",
    "slurm_args",
    "time_limit",
)
"""Keys of LauncherConfig.scheduler_args that are handed to Monarch's SlurmJob."""


class HostLauncher:
    """Allocates hosts by name and gives them back. `local` knows only this machine."""

    def __init__(self, cfg: LauncherConfig) -> None:
        self.cfg = cfg
        self._jobs: dict[str, Any] = {}
        unknown = sorted(set(cfg.scheduler_args) - set(SLURM_ARGS))
        if unknown:
            raise ValueError(
                f"LauncherConfig.scheduler_args: unknown {unknown}, expected some of {SLURM_ARGS}"
            )
        if cfg.launcher is Launcher.SLURM:
            # For Monarch's client, which must start with it before SlurmJob sets another one.
            enable_transport(cfg.transport)
        if cfg.launcher is Launcher.MAST:
            raise ValueError(
                "LauncherConfig.launcher = 'mast': Monarch's public release has no MAST job; "
                "expected local or slurm (or install torchforge, whose launcher supports it)"
            )

    async def allocate(self, name: str, num_hosts: int) -> HostMesh:
        """Submits a job of `num_hosts` hosts and waits until its workers can be reached.

        Raises RuntimeError if the launcher has no remote hosts, or if the scheduler refuses.
        """
        if self.cfg.launcher is not Launcher.SLURM:
            raise RuntimeError(
                f"mesh {name!r} asks for hosts={num_hosts}, but the launcher is local: "
                "set provisioner.launcher to slurm, or hosts to null"
            )
        from monarch._src.job.slurm import SlurmJob

        key = re.sub(r"\W", "_", name)
        job_name = f"{self.cfg.job_name or 'forge_ptq'}_{key}"
        job = SlurmJob({key: num_hosts}, job_name=job_name, **self.cfg.scheduler_args)
        self._jobs[name] = job
        await asyncio.to_thread(job.apply)
        state = await asyncio.to_thread(job.state, None)
        return getattr(state, key)

    async def release(self, name: str) -> None:
        """Ends the job that holds the hosts of `name`, if there is one."""
        job = self._jobs.pop(name, None)
        if job is not None:
            await asyncio.to_thread(job.kill)

    async def release_all(self) -> None:
        """Ends all jobs."""
        for name in list(self._jobs):
            await self.release(name)
