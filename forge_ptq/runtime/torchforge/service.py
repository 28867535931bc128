"""torchforge's `ServiceInterface` with deadlines, bounds, waiting, and errors that are raised."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forge.controller.service import ServiceInterface as TorchforgeInterface
from forge.controller.service.interface import ServiceEndpoint as TorchforgeEndpoint

from forge_ptq.runtime.own.types import (
    ActorDied,
    QueueFull,
    RequestTimeout,
    ServiceConfig,
    ServiceUnavailable,
)

_POLL_S = 0.05


def _look_at_exception(request: asyncio.Future[Any]) -> None:
    """Keeps asyncio from reporting the failure of a request that nobody waits for any more."""
    if not request.cancelled():
        request.exception()


class Gate:
    """Admits as many requests to a service as its replicas and its queue may hold."""

    def __init__(self, cfg: ServiceConfig) -> None:
        working = cfg.num_replicas * cfg.replica_max_concurrent_requests
        self._max_queued = cfg.max_queued_requests
        self._limit = working + cfg.max_queued_requests
        self._inside = 0

    @contextmanager
    def admit(self, what: str) -> Iterator[None]:
        """Counts one request while it is inside; QueueFull if there is no room."""
        if self._inside >= self._limit:
            raise QueueFull(f"{what}: the queue is full (max_queued_requests = {self._max_queued})")
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1


class ServiceEndpoint:
    """`route` and `fanout` of torchforge's endpoint, with our failures."""

    def __init__(
        self, inner: TorchforgeEndpoint, cfg: ServiceConfig, gate: Gate, name: str
    ) -> None:
        self._inner = inner
        self._gate = gate
        self._service = inner.service
        self._cfg = cfg
        self._what = f"{name}.{inner.endpoint_name}"

    def _any_healthy(self) -> bool:
        return any(replica.healthy for replica in self._service._replicas)

    async def _wait_healthy(self) -> None:
        limit = time.monotonic() + self._cfg.unavailable_timeout_s
        if self._service._shutdown_requested:
            raise ServiceUnavailable(f"{self._what}: the service is shut down")
        while not self._any_healthy():
            if time.monotonic() > limit:
                raise ServiceUnavailable(
                    f"{self._what}: no healthy replica within "
                    f"{self._cfg.unavailable_timeout_s:g} s (unavailable_timeout_s)"
                )
            await asyncio.sleep(_POLL_S)

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """One replica's result; see own.service.Service.route for what it raises."""
        deadline = asyncio.timeout(self._cfg.request_timeout_s)
        try:
            with self._gate.admit(self._what):
                async with deadline:
                    return await self._route(args, kwargs)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            seconds = self._cfg.request_timeout_s
            raise RequestTimeout(f"{self._what} did not answer within {seconds:g} s") from error

    async def _route(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        for _ in range(self._cfg.max_attempts):
            await self._wait_healthy()
            request = asyncio.ensure_future(self._inner.route(*args, **kwargs))
            request.add_done_callback(_look_at_exception)
            try:
                # torchforge's replica cannot bear that a request which it works on is cancelled.
                result = await asyncio.shield(request)
            except RuntimeError as error:  # a replica died, or none was there to take it
                last: BaseException = error
                continue
            if isinstance(result, BaseException):  # torchforge returns what the endpoint raised
                raise result
            return result
        attempts = self._cfg.max_attempts
        raise ActorDied(f"{self._what}: replicas died under {attempts} attempts") from last

    async def fanout(self, *args: Any, **kwargs: Any) -> list[Any]:
        """All healthy replicas' results; None for one that died meanwhile."""
        await self._wait_healthy()
        seconds = self._cfg.request_timeout_s
        try:
            results = await asyncio.wait_for(self._inner.fanout(*args, **kwargs), seconds)
        except TimeoutError as error:
            raise RequestTimeout(f"{self._what} did not answer within {seconds:g} s") from error
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self._what}.{name}: a service has route() and fanout()")


class ServiceInterface(TorchforgeInterface):
    """torchforge's interface with ServiceEndpoints of ours, pids, and on_respawn."""

    def __init__(self, service: Any, actor_def: type, cfg: ServiceConfig) -> None:
        super().__init__(service, actor_def)
        self._callbacks: list[Any] = []
        gate = Gate(cfg)
        for key, value in list(self.__dict__.items()):
            if isinstance(value, TorchforgeEndpoint):
                setattr(self, key, ServiceEndpoint(value, cfg, gate, actor_def.__name__))

    def pids(self) -> list[int]:
        """Pids of all replicas, in order of replica and rank."""
        actors = [replica.actor for replica in self._service._replicas]
        return [pid for actor in actors if actor is not None for pid in actor.processes.pids]

    def on_respawn(self, callback: Any) -> None:
        """Calls `callback(replica_idx, actor)` on a respawned replica before it gets requests."""
        self._callbacks.append(callback)

    async def respawned(self, actor: Any) -> None:
        """Called by ForgeActor.launch once the service is up."""
        task = asyncio.current_task()
        replicas = self._service._replicas
        index = next((r.idx for r in replicas if r._recovery_task is task), -1)
        for callback in self._callbacks:
            outcome = callback(index, actor)
            if inspect.isawaitable(outcome):
                await outcome
