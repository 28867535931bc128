"""One replica of a service: its actor, its slots for requests, and its state."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import deque
from enum import Enum
from typing import Any

from monarch.actor import ActorError

from forge_ptq.runtime.own.handle import ActorHandle
from forge_ptq.runtime.own.types import ActorDied, RequestTimeout, ServiceConfig


class ReplicaState(Enum):
    """STARTING and RECOVERING get no requests; FAILED is not tried again."""

    STARTING = "starting"
    HEALTHY = "healthy"
    RECOVERING = "recovering"
    FAILED = "failed"
    STOPPED = "stopped"


class ReplicaLost(RuntimeError):
    """The replica went away; `started` tells whether it had begun to work on the request."""

    def __init__(self, message: str, started: bool) -> None:
        super().__init__(message)
        self.started = started


class Slots:
    """Admits `limit` holders at a time, others wait in order; `close` sends all waiters away."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.active = 0
        self.waiting = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def acquire(self, timeout_s: float) -> None:
        """Takes a slot. Raises TimeoutError, or what `close` was given."""
        if self.active < self.limit:
            self.active += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self.waiting += 1
        try:
            async with asyncio.timeout(timeout_s):  # wait_for may swallow a cancellation
                await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release()  # the slot came at the very moment of giving up
            waiter.cancel()
            raise
        finally:
            self.waiting -= 1

    def release(self) -> None:
        """Gives a slot to the next waiter, or frees it."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.active -= 1

    def close(self, error: Exception) -> None:
        """Ends all waiting with `error`."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(error)


class Replica:
    """An actor launched from `actor_def`, and relaunched after its death."""

    def __init__(
        self, idx: int, cfg: ServiceConfig, actor_def: Any, args: tuple, kwargs: dict[str, Any]
    ) -> None:
        self.idx = idx
        self.cfg = cfg
        self.name = actor_def.__name__
        base = cfg.mesh_name or self.name
        mesh_name = base if cfg.num_replicas == 1 else f"{base}_{idx}"
        self.actor_def = actor_def.options(mesh_name=mesh_name)
        self.args = args
        self.kwargs = kwargs
        self.actor: Any = None
        self.state = ReplicaState.STARTING
        self.slots = Slots(cfg.replica_max_concurrent_requests)
        self.served = 0
        self.respawns = 0

    @property
    def load(self) -> int:
        """Requests in work or in this replica's queue."""
        return self.slots.active + self.slots.waiting

    @property
    def healthy(self) -> bool:
        """Takes requests, and none of its local processes is known to be dead."""
        return self.state is ReplicaState.HEALTHY and not self.dead

    @property
    def dead(self) -> bool:
        """One of its local processes is known to be dead."""
        return isinstance(self.actor, ActorHandle) and self.actor.processes.dead_pid() is not None

    def pids(self) -> list[int]:
        """Pids by rank; empty while there is no actor."""
        return list(self.actor.processes.pids) if self.actor is not None else []

    async def launch(self) -> None:
        """Starts processes and actor and runs setup(). The state is left to the service."""
        self.actor = await self.actor_def.launch(*self.args, **self.kwargs)
        self.slots = Slots(self.cfg.replica_max_concurrent_requests)

    def lose(self, reason: str) -> None:
        """No more requests; those that wait here go to another replica."""
        self.state = ReplicaState.RECOVERING
        self.slots.close(ReplicaLost(f"replica {self.idx} of {self.name}: {reason}", False))

    async def bury(self) -> None:
        """Ends what is left of the actor's processes."""
        actor, self.actor = self.actor, None
        if actor is not None:
            await self.actor_def.shutdown(actor)

    async def request(
        self,
        endpoint: str,
        args: tuple,
        kwargs: dict[str, Any],
        deadline: float,
    ) -> Any:
        """Waits for a slot and calls the endpoint; `deadline` is on the monotonic clock.

        Raises ReplicaLost (try another one), RequestTimeout, or what the endpoint raised.
        """
        what = f"{self.name}.{endpoint} on replica {self.idx}"
        slots = self.slots
        try:
            await slots.acquire(deadline - time.monotonic())
        except TimeoutError as error:
            limit = self.cfg.request_timeout_s
            raise RequestTimeout(f"{what}: no free slot within {limit:g} s") from error
        try:
            return await self.call(endpoint, args, kwargs, deadline)
        finally:
            slots.release()

    async def call(
        self, endpoint: str, args: tuple, kwargs: dict[str, Any], deadline: float
    ) -> Any:
        """As request(), past the queue."""
        what = f"{self.name}.{endpoint} on replica {self.idx}"
        if self.actor is None:
            raise ReplicaLost(f"{what}: the replica is respawning", False)
        actor = copy.copy(self.actor)
        actor.request_timeout_s = max(deadline - time.monotonic(), 0.0)
        try:
            result = await getattr(actor, endpoint).call(*args, **kwargs)
        except ActorDied as error:
            if isinstance(error.__cause__, ActorError):
                raise  # raised by the endpoint itself, about some other actor
            raise ReplicaLost(f"{what}: {error}", True) from error
        except RequestTimeout as error:
            if isinstance(error.__cause__, ActorError):
                raise
            if self.cfg.restart_on_timeout:
                actor.processes.kill()
            limit = self.cfg.request_timeout_s
            raise RequestTimeout(f"{what} did not answer within {limit:g} s") from error
        self.served += 1
        if self.cfg.return_first_rank_result:
            return next(iter(result.items()))[1]
        return result
