"""`ServiceInterface`: what `as_service` returns; `Session`: pins requests to a replica."""

from __future__ import annotations

import contextvars
import uuid
from typing import Any

from monarch._src.actor.endpoint import EndpointProperty

from forge_ptq.runtime.own.service import RespawnCallback, Service

_sessions: contextvars.ContextVar[dict[int, str]] = contextvars.ContextVar("forge_ptq_sessions")
"""Per asyncio task: id of a service -> session opened on it by `async with`."""


class ServiceEndpoint:
    """One endpoint of a service: `route` to one replica, `fanout` to all healthy ones."""

    def __init__(self, service: Service, name: str) -> None:
        self._service = service
        self._name = name

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on one replica: that of the session (`sess_id=` or `async with`), else as routed."""
        session_id = kwargs.pop("sess_id", None)
        if session_id is None:
            session_id = _sessions.get({}).get(id(self._service))
        return await self._service.route(self._name, args, kwargs, session_id)

    async def fanout(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs on every healthy replica; one result per replica, None if it died meanwhile."""
        return await self._service.fanout(self._name, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self._service.name}.{self._name}.{name}: a service has route() and fanout(); "
            "call(), call_one(), choose() and broadcast() are for actors"
        )


class Session:
    """`async with service.session() as session:` pins the requests made inside to one replica."""

    def __init__(self, interface: ServiceInterface) -> None:
        self._interface = interface
        self._token: contextvars.Token[dict[int, str]] | None = None
        self.session_id: str | None = None

    async def __aenter__(self) -> Session:
        self.session_id = await self._interface.start_session()
        pinned = {**_sessions.get({}), id(self._interface.service): self.session_id}
        self._token = _sessions.set(pinned)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._token is not None:
            _sessions.reset(self._token)
        if self.session_id is not None:
            await self._interface.terminate_session(self.session_id)
            self.session_id = None


class ServiceInterface:
    """A service, seen by the app. Each endpoint of the actor class is a ServiceEndpoint here.

    It belongs to the client's event loop and cannot be sent to other actors.
    """

    def __init__(self, service: Service, actor_def: type) -> None:
        self.service = service
        self.actor_def = actor_def
        for name in dir(actor_def):
            if isinstance(getattr(actor_def, name, None), EndpointProperty):
                if hasattr(type(self), name):
                    raise TypeError(f"{actor_def.__name__}.{name}: services reserve this name")
                setattr(self, name, ServiceEndpoint(service, name))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.actor_def.__name__} has no endpoint {name!r}")

    def __reduce__(self) -> Any:
        raise TypeError(
            f"the service {self.actor_def.__name__} lives in the client: pass an actor instead"
        )

    def __repr__(self) -> str:
        states = [replica.state.value for replica in self.service.replicas]
        return f"ServiceInterface({self.actor_def.__name__}, {states})"

    def session(self) -> Session:
        """A context manager that pins requests to one replica."""
        return Session(self)

    async def start_session(self) -> str:
        """Opens a session; pass its id as `sess_id=` to route()."""
        session_id = str(uuid.uuid4())
        self.service.sessions.open(session_id)
        return session_id

    async def terminate_session(self, sess_id: str) -> None:
        """Closes a session."""
        self.service.sessions.close(sess_id)

    async def shutdown(self) -> None:
        """Ends all replicas."""
        await self.service.stop()

    def pids(self) -> list[int]:
        """Pids of all replicas, in order of replica and rank."""
        return self.service.pids()

    def on_respawn(self, callback: RespawnCallback) -> None:
        """Registers `callback(replica_idx, actor)`; see Service.on_respawn."""
        self.service.on_respawn(callback)

    async def get_metrics_summary(self) -> dict[str, Any]:
        """State and load of the service and of each replica."""
        replicas = self.service.replicas
        return {
            "service": {
                "total_sessions": len(self.service.sessions.assigned),
                "healthy_replicas": sum(replica.healthy for replica in replicas),
                "total_replicas": len(replicas),
            },
            "replicas": {
                replica.idx: {
                    "state": replica.state.value,
                    "active_requests": replica.slots.active,
                    "queue_depth": replica.slots.waiting,
                    "successful_requests": replica.served,
                    "respawns": replica.respawns,
                }
                for replica in replicas
            },
        }
