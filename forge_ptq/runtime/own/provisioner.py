"""Starts and ends processes: placement, GPUs, shared processes, and shutting down for certain."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
from typing import Any, Protocol

from monarch.actor import this_host

from forge_ptq.runtime.own.gpus import GpuPool, visible_gpus
from forge_ptq.runtime.own.handle import ActorHandle
from forge_ptq.runtime.own.launcher import HostLauncher
from forge_ptq.runtime.own.process import ProcessGroup
from forge_ptq.runtime.own.start import start_monarch
from forge_ptq.runtime.own.types import ProcessConfig, ProvisionerConfig

log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 15.0


class Stoppable(Protocol):
    """What the provisioner shuts down before the processes: services."""

    async def stop(self) -> None:
        """Stops accepting and respawning."""


def check_shared_env(cfg: ProcessConfig, running: ProcessConfig) -> None:
    """ValueError if `cfg` wants environment that its colocate group was not started with."""
    differing = {k: v for k, v in cfg.env.items() if running.env.get(k) != v}
    if differing:
        raise ValueError(
            f"colocate group {cfg.colocate!r} runs already, without env {differing}: "
            "expected the same env for every actor of a group"
        )


class Provisioner:
    """All processes of this client. One per client: use the functions at the end of the file."""

    def __init__(self, cfg: ProvisionerConfig | None = None) -> None:
        self.cfg = cfg or ProvisionerConfig()
        self.launcher = HostLauncher(self.cfg.launcher_config)
        start_monarch()  # after the launcher, which chooses the transport
        self.gpus = GpuPool(visible_gpus())
        self.groups: list[ProcessGroup] = []
        self.services: list[Stoppable] = []
        self._shared: dict[str, ProcessGroup] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        atexit.register(self.kill_all)

    async def acquire(self, cfg: ProcessConfig) -> ProcessGroup:
        """Processes for one actor: new ones, or those of its `colocate` group if they live."""
        if cfg.colocate is None:
            return await self._start(cfg)
        async with self._locks.setdefault(cfg.colocate, asyncio.Lock()):
            group = self._shared.get(cfg.colocate)
            if group is None or not group.alive():
                group = await self._start(cfg)
                self._shared[cfg.colocate] = group
            else:
                check_shared_env(cfg, group.cfg)
                group.users += 1
            return group

    async def _start(self, cfg: ProcessConfig) -> ProcessGroup:
        name = self._unused(cfg.colocate or cfg.mesh_name or "mesh")
        local = cfg.hosts is None
        host_mesh = this_host() if local else await self.launcher.allocate(name, cfg.hosts or 1)
        group = ProcessGroup(name, cfg, host_mesh, local)
        if cfg.with_gpus:
            # Remote hosts are allocated whole: their ranks use GPUs 0..procs-1.
            group.gpu_ids = self.gpus.take(cfg.procs, name) if local else list(range(cfg.procs))
        group.users = 1
        self.groups.append(group)
        try:
            await group.start(cfg.spawn_timeout_s)
        except BaseException:
            await self._end(group)
            raise
        return group

    def _unused(self, name: str) -> str:
        """`name`, or name_2, name_3, ... if living processes have it already."""
        taken = {group.name for group in self.groups}
        names = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2)))
        return next(candidate for candidate in names if candidate not in taken)

    async def release(self, group: ProcessGroup) -> None:
        """One user less; the last one ends the processes."""
        group.users -= 1
        if group.users <= 0:
            await self._end(group)

    async def _end(self, group: ProcessGroup) -> None:
        if group not in self.groups:
            return
        self.groups.remove(group)
        for key in [k for k, shared in self._shared.items() if shared is group]:
            del self._shared[key]
        try:
            await group.stop()
        finally:
            if group.local:
                self.gpus.give_back(group.gpu_ids)
            else:
                await self.launcher.release(group.name)

    def kill_all(self) -> None:
        """SIGKILL to every local process: the last resort, also at the interpreter's exit."""
        for group in self.groups:
            group.ref.kill()

    async def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Stops services, then all processes; what is left after `timeout_s` is killed."""
        services, self.services = self.services, []
        groups = list(self.groups)
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                await asyncio.gather(*(service.stop() for service in services))
                groups = list(self.groups)
                await asyncio.gather(*(self._end(group) for group in groups))
                await self.launcher.release_all()
        except TimeoutError:
            if not deadline.expired():
                raise
            log.warning("shutting down took more than %g s: killing what is left", timeout_s)
        finally:
            for group in groups:
                group.ref.kill()
            atexit.unregister(self.kill_all)


_provisioner: Provisioner | None = None


async def init_provisioner(cfg: ProvisionerConfig | None = None) -> Provisioner:
    """The client's provisioner, made on the first call (later `cfg`s are ignored)."""
    return get_provisioner(cfg)


def get_provisioner(cfg: ProvisionerConfig | None = None) -> Provisioner:
    """As init_provisioner, without await."""
    global _provisioner
    if _provisioner is None:
        _provisioner = Provisioner(cfg)
    return _provisioner


def current_provisioner() -> Provisioner | None:
    """The provisioner, if there is one."""
    return _provisioner


async def get_proc_mesh(process_config: ProcessConfig) -> Any:
    """A Monarch ProcMesh placed as configured; it ends at shutdown()."""
    return (await get_provisioner().acquire(process_config)).mesh


def forget_provisioner() -> None:
    """Lets the next init_provisioner start afresh (after shutdown)."""
    global _provisioner
    _provisioner = None


async def pids(handle: Any) -> list[int]:
    """Pids of the processes behind an actor handle or a service, replicas and ranks in order."""
    if isinstance(handle, ActorHandle):
        return list(handle.processes.pids)
    return list(handle.pids())


async def kill_local(handle: Any) -> None:
    """SIGKILL to the processes behind an actor handle or a service that run on this machine, for
    one that hangs; a service then brings fresh ones."""
    one = isinstance(handle, ActorHandle)
    for actor in [handle] if one else [replica.actor for replica in handle.service.replicas]:
        if isinstance(actor, ActorHandle):
            actor.processes.kill()
