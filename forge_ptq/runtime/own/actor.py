"""`ForgeActor`: base class of all actors, and the way to spawn them."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
from typing import Any, TypeVar

from monarch.actor import Actor, current_rank, current_size, endpoint

from forge_ptq.runtime.own.handle import ActorHandle
from forge_ptq.runtime.own.provisioner import get_provisioner
from forge_ptq.runtime.own.types import ProcessConfig, RequestTimeout, ServiceConfig

T = TypeVar("T", bound="ForgeActor")

_PROCESS_FIELDS = {field.name for field in dataclasses.fields(ProcessConfig)}
_SERVICE_FIELDS = {field.name for field in dataclasses.fields(ServiceConfig)}
STOP_ACTOR_TIMEOUT_S = 3.0


class ForgeActor(Actor):
    """Spawned as one actor or as a service of replicas:

        trainer = await Trainer.options(procs=2, mesh_name="trainer").as_actor(model=...)
        await trainer.train_step.call(...)                     # every rank
        policy = await Generator.options(num_replicas=2).as_service(engine_args=...)
        await policy.generate.route(prompt)                    # one replica
        await policy.update_weights.fanout(version)            # every healthy replica

    The constructor should only keep its arguments; heavy work belongs in `setup()`, which runs in
    every process before the actor (or the respawned replica) gets its first request.
    Subclasses may override `launch` and `shutdown`, which a service uses for each replica.
    """

    _options: dict[str, Any] = {}  # noqa: RUF012  (replaced, never changed, by options())
    _spawn_class: type[ForgeActor] | None = None

    @functools.cached_property
    def _rank(self) -> int:
        """Rank of this process within the actor; for use inside endpoints."""
        return current_rank().rank

    @functools.cached_property
    def _size(self) -> int:
        """Number of processes of the actor."""
        return math.prod(current_size().values())

    @endpoint
    async def setup(self) -> None:
        """Heavy initialization; does nothing here."""

    @classmethod
    def options(cls: type[T], **options: Any) -> type[T]:
        """This class with placement and limits: fields of ProcessConfig and ServiceConfig.

        Raises TypeError naming an unknown option.
        """
        unknown = sorted(set(options) - _PROCESS_FIELDS - _SERVICE_FIELDS)
        if unknown:
            known = sorted(_PROCESS_FIELDS | _SERVICE_FIELDS)
            raise TypeError(f"{cls.__name__}.options: unknown {unknown}, expected some of {known}")
        merged = {**cls._options, **options}
        spawn_class = cls._spawn_class or cls
        members = {"_options": merged, "_spawn_class": spawn_class, "__module__": cls.__module__}
        return type(cls.__name__, (cls,), members)

    @classmethod
    def _process_config(cls) -> ProcessConfig:
        return ProcessConfig(**{k: v for k, v in cls._options.items() if k in _PROCESS_FIELDS})

    @classmethod
    async def launch(cls, *args: Any, **kwargs: Any) -> ActorHandle:
        """Starts the processes, the actor in them, and its setup(). Raises what setup() raises."""
        cfg = cls._process_config()
        if cfg.mesh_name is None:
            cfg.mesh_name = cls.__name__
        provisioner = get_provisioner()
        group = await provisioner.acquire(cfg)
        name = kwargs.pop("name", cls.__name__)
        try:
            mesh = group.mesh.spawn(name, cls._spawn_class or cls, *args, **kwargs)
            actor = ActorHandle(mesh, name, group.ref, cfg.spawn_timeout_s)
            await actor.setup.call()
        except BaseException:
            await provisioner.release(group)
            raise
        actor.request_timeout_s = cfg.request_timeout_s
        return actor

    @classmethod
    async def as_actor(cls, *args: Any, **kwargs: Any) -> Any:
        """Spawns one actor (an ActorHandle). It lives until ForgeActor.shutdown or shutdown()."""
        return await cls.launch(*args, **kwargs)

    @classmethod
    async def as_service(cls, *args: Any, **kwargs: Any) -> Any:
        """Spawns `num_replicas` replicas behind a ServiceInterface; all are set up on return."""
        from forge_ptq.runtime.own.interface import ServiceInterface
        from forge_ptq.runtime.own.service import Service

        cfg = ServiceConfig(**{k: v for k, v in cls._options.items() if k in _SERVICE_FIELDS})
        service = Service(cfg, cls, args, kwargs)
        await service.start()
        get_provisioner().services.append(service)
        return ServiceInterface(service, cls)

    @classmethod
    async def shutdown(cls, actor: ActorHandle) -> None:
        """Ends an actor; its processes too, unless other actors share them."""
        provisioner = get_provisioner()
        group = next((g for g in provisioner.groups if g.ref == actor.processes), None)
        if group is None:
            return
        if group.users > 1 and group.alive():

            async def stop() -> None:
                await actor.mesh.stop()

            try:
                await asyncio.wait_for(stop(), STOP_ACTOR_TIMEOUT_S)
            except TimeoutError as error:
                raise RequestTimeout(f"{actor!r} did not stop") from error
        await provisioner.release(group)
