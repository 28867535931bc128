"""torchforge's `ForgeActor` with the options and the handles of our interface."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, TypeVar

from forge.controller import ForgeActor as TorchforgeActor
from forge.controller.provisioner import register_service
from forge.controller.service import LeastLoadedRouter, Service
from forge.types import ServiceConfig as ForgeServiceConfig

from forge_ptq.runtime.own.handle import ActorHandle
from forge_ptq.runtime.own.types import ProcessConfig, ServiceConfig
from forge_ptq.runtime.torchforge.processes import acquire, release, spawned_for
from forge_ptq.runtime.torchforge.service import ServiceInterface

T = TypeVar("T", bound="ForgeActor")

_PROCESS_FIELDS = {field.name for field in dataclasses.fields(ProcessConfig)}
_SERVICE_FIELDS = {field.name for field in dataclasses.fields(ServiceConfig)}
_FORGE_FIELDS = {field.name for field in dataclasses.fields(ForgeServiceConfig)}


class ForgeActor(TorchforgeActor):
    """See own.actor.ForgeActor: the same interface on torchforge's classes."""

    _options: dict[str, Any] = {}  # noqa: RUF012  (replaced, never changed, by options())
    _spawn_class: type[ForgeActor] | None = None
    _interface: ServiceInterface | None = None

    @classmethod
    def options(cls: type[T], **options: Any) -> type[T]:
        """This class with placement and limits; TypeError names an unknown option."""
        unknown = sorted(set(options) - _PROCESS_FIELDS - _SERVICE_FIELDS)
        if unknown:
            known = sorted(_PROCESS_FIELDS | _SERVICE_FIELDS)
            raise TypeError(f"{cls.__name__}.options: unknown {unknown}, expected some of {known}")
        merged = {**cls._options, **options}
        return cls._derive(_options=merged, mesh_name=merged.get("mesh_name"))

    @classmethod
    def _derive(cls: type[T], **members: Any) -> type[T]:
        """A subclass for the client only: what is spawned is the class as its author wrote it."""
        spawn_class = cls._spawn_class or cls
        members = {"_spawn_class": spawn_class, "__module__": cls.__module__, **members}
        return type(cls.__name__, (cls,), members)

    @classmethod
    async def launch(cls, *args: Any, **kwargs: Any) -> Any:
        """Starts processes, actor and setup(); torchforge's Replica calls it, too."""
        fields = {k: v for k, v in cls._options.items() if k in _PROCESS_FIELDS}
        # torchforge's Replica appends its number to the class attribute mesh_name.
        cfg = ProcessConfig(**{**fields, "mesh_name": cls.mesh_name or cls.__name__})
        spawned = await acquire(cfg)
        name = kwargs.pop("name", cls.__name__)
        try:
            mesh = spawned.proc_mesh.spawn(name, cls._spawn_class or cls, *args, **kwargs)
            actor = ActorHandle(mesh, name, spawned.ref, cfg.spawn_timeout_s)
            await actor.setup.call()
            if cls._interface is not None:
                await cls._interface.respawned(actor)
        except BaseException:
            await release(spawned)
            raise
        # torchforge's Replica takes any exception but ActorError for its actor's death, so that
        # deadlines are left to ServiceEndpoint.
        actor.request_timeout_s = None
        actor.unwrap_errors = False
        return actor

    @classmethod
    async def as_actor(cls, *args: Any, **kwargs: Any) -> Any:
        """Spawns one actor (an ActorHandle)."""
        actor = await cls.launch(*args, **kwargs)
        fields = {k: v for k, v in cls._options.items() if k in _PROCESS_FIELDS}
        actor.request_timeout_s = ProcessConfig(**fields).request_timeout_s
        actor.unwrap_errors = True
        return actor

    @classmethod
    async def as_service(cls, *args: Any, **kwargs: Any) -> Any:
        """Spawns torchforge's Service behind our ServiceInterface."""
        cfg = ServiceConfig(**{k: v for k, v in cls._options.items() if k in _SERVICE_FIELDS})
        if cfg.restart_on_timeout:
            raise ValueError("options.restart_on_timeout = True: torchforge's services lack it")
        fields = {k: getattr(cfg, k) for k in _FORGE_FIELDS}
        if cfg.num_replicas == 1:
            fields["mesh_name"] = None  # the Replica adds its number only to a given name
        actor_def = cls._derive()
        service = Service(ForgeServiceConfig(**fields), actor_def, args, kwargs)
        await asyncio.wait_for(service.__initialize__(), cfg.spawn_timeout_s)
        if cfg.routing == "least_loaded":
            service._default_router = LeastLoadedRouter()
        interface = ServiceInterface(service, actor_def, cfg)
        actor_def._interface = interface
        await register_service(interface)
        return interface

    @classmethod
    async def shutdown(cls, actor: Any) -> None:
        """Ends an actor; its processes too, unless other actors share them."""
        if actor is None:
            return  # torchforge's Replica has none after a failed respawn
        spawned = spawned_for(actor.processes)
        if spawned is None:
            return
        if spawned.users > 1 and spawned.ref.dead_pid() is None:
            await actor.mesh.stop()
        await release(spawned)
