"""Processes under torchforge's provisioner: its placement, our bootstrap, and certain ends."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Mapping
from typing import Any

import monarch.actor
from forge import types as forge_types
from forge.controller import provisioner as forge_provisioner

from forge_ptq.runtime import shims
from forge_ptq.runtime.own import child
from forge_ptq.runtime.own.agent import ProcessAgent
from forge_ptq.runtime.own.handle import ProcessRef
from forge_ptq.runtime.own.process import STOP_TIMEOUT_S, bootstrap_command
from forge_ptq.runtime.own.provisioner import check_shared_env
from forge_ptq.runtime.own.start import start_monarch
from forge_ptq.runtime.own.types import ProcessConfig

log = logging.getLogger(__name__)

_env: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar("forge_ptq_spawn_env")
"""Environment for the processes that torchforge spawns in this context."""


class OurHost:
    """This machine as torchforge's provisioner sees it: spawn_procs goes through child.py."""

    def __init__(self, host_mesh: Any) -> None:
        self._host_mesh = host_mesh

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host_mesh, name)

    def spawn_procs(self, per_host: dict[str, int], name: str | None = None) -> Any:
        """As HostMesh.spawn_procs, with our first code in each process."""
        env = {child.PRELOAD: shims.__file__, **_env.get({})}
        command = bootstrap_command(name or "anon", per_host["procs"], env)
        return self._host_mesh.spawn_procs(per_host=per_host, name=name, bootstrap_command=command)


def _this_host() -> OurHost:
    return OurHost(monarch.actor.this_host())


forge_provisioner.this_host = _this_host


class SpawnedMesh:
    """A proc mesh of torchforge's, and what the seam must know of it."""

    def __init__(self, proc_mesh: Any, ref: ProcessRef, cfg: ProcessConfig) -> None:
        self.cfg = cfg
        self.proc_mesh = proc_mesh
        self.ref = ref
        self.users = 1


_spawned: list[SpawnedMesh] = []
_shared: dict[str, SpawnedMesh] = {}
_locks: dict[str, asyncio.Lock] = {}


async def acquire(cfg: ProcessConfig) -> SpawnedMesh:
    """Processes for one actor: new ones, or those of its `colocate` group if they live."""
    if cfg.colocate is None:
        return await _spawn(cfg)
    async with _locks.setdefault(cfg.colocate, asyncio.Lock()):
        spawned = _shared.get(cfg.colocate)
        if spawned is None or spawned.ref.dead_pid() is not None:
            spawned = _shared[cfg.colocate] = await _spawn(cfg)
        else:
            check_shared_env(cfg, spawned.cfg)
            spawned.users += 1
        return spawned


async def _spawn(cfg: ProcessConfig) -> SpawnedMesh:
    start_monarch()
    name = cfg.colocate or cfg.mesh_name or "mesh"
    forge_cfg = forge_types.ProcessConfig(
        procs=cfg.procs, with_gpus=cfg.with_gpus, hosts=cfg.hosts, mesh_name=name
    )
    token = _env.set(cfg.env)
    try:
        proc_mesh = await asyncio.wait_for(
            forge_provisioner.get_proc_mesh(forge_cfg), cfg.spawn_timeout_s
        )
    finally:
        _env.reset(token)
    agents = proc_mesh.spawn("agent", ProcessAgent, name)

    async def describe() -> Any:
        return await agents.describe.call()

    answers = await asyncio.wait_for(describe(), cfg.spawn_timeout_s)
    identities = tuple(identity for _, (identity, _) in answers.items())
    pids = tuple(identity.pid for identity in identities)
    watched = identities if cfg.hosts is None else ()
    spawned = SpawnedMesh(proc_mesh, ProcessRef(name, pids, watched), cfg)
    _spawned.append(spawned)
    return spawned


def spawned_for(ref: ProcessRef) -> SpawnedMesh | None:
    """The living mesh with these processes."""
    return next((spawned for spawned in _spawned if spawned.ref == ref), None)


async def release(spawned: SpawnedMesh) -> None:
    """One user less; the last one ends the processes."""
    spawned.users -= 1
    if spawned.users > 0 or spawned not in _spawned:
        return
    _spawned.remove(spawned)
    for key in [key for key, shared in _shared.items() if shared is spawned]:
        del _shared[key]
    try:
        await asyncio.wait_for(forge_provisioner.stop_proc_mesh(spawned.proc_mesh), STOP_TIMEOUT_S)
    except (TimeoutError, RuntimeError) as error:
        log.warning("%s did not stop in order (%r); killing it", spawned.ref.name, error)
    spawned.ref.kill()


async def release_all() -> None:
    """Ends all processes."""
    for spawned in list(_spawned):
        spawned.users = 1
        await release(spawned)


def kill_all() -> None:
    """SIGKILL to every local process."""
    for spawned in _spawned:
        spawned.ref.kill()
