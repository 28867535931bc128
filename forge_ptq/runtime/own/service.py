"""`Service`: replicas behind one door. Routing, retries, respawns, limits.

The service lives in the client's event loop. A request is tried again on another replica only if
the *process* that worked on it died; what an endpoint raises reaches its caller once and as it is.
Endpoints must therefore tolerate being run twice, the first time cut short.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable
from typing import Any

from forge_ptq.runtime.own.replica import Replica, ReplicaLost, ReplicaState
from forge_ptq.runtime.own.router import LeastLoadedRouter, RoundRobinRouter, SessionRouter
from forge_ptq.runtime.own.types import (
    ActorDied,
    QueueFull,
    RequestTimeout,
    ServiceConfig,
    ServiceUnavailable,
)

log = logging.getLogger(__name__)

MAX_FAILED_RESPAWNS = 5
FIRST_BACKOFF_S = 0.5
RespawnCallback = Callable[[int, Any], Any]


class Service:
    """`num_replicas` replicas of `actor_def`."""

    def __init__(
        self, cfg: ServiceConfig, actor_def: Any, args: tuple, kwargs: dict[str, Any]
    ) -> None:
        self.cfg = cfg
        self.name = actor_def.__name__
        self.replicas = [Replica(i, cfg, actor_def, args, kwargs) for i in range(cfg.num_replicas)]
        self.sessions = SessionRouter()
        self._router = LeastLoadedRouter() if cfg.routing == "least_loaded" else RoundRobinRouter()
        self._homeless = 0
        self._stopped = False
        self._changed = asyncio.Event()
        self._health_task: asyncio.Task[None] | None = None
        self._respawn_tasks: dict[int, asyncio.Task[None]] = {}
        self._callbacks: list[RespawnCallback] = []
        self._last_error: BaseException | None = None

    async def start(self) -> None:
        """Launches all replicas at once. If one fails, all are ended and its error is raised."""
        results = await asyncio.gather(
            *(replica.launch() for replica in self.replicas), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await self.stop()
            raise errors[0]
        for replica in self.replicas:
            replica.state = ReplicaState.HEALTHY
        self._health_task = asyncio.create_task(self._watch_health())

    def on_respawn(self, callback: RespawnCallback) -> None:
        """Calls `callback(replica_idx, actor)` (sync or async) on a respawned replica.

        It runs after setup() and before the replica takes requests; if it raises, the respawn
        counts as failed and is tried again.
        """
        self._callbacks.append(callback)

    def pids(self) -> list[int]:
        """Pids of all replicas, in order of replica and rank."""
        return [pid for replica in self.replicas for pid in replica.pids()]

    # requests

    async def route(
        self, endpoint: str, args: tuple, kwargs: dict[str, Any], session_id: str | None
    ) -> Any:
        """Runs one request on one replica. Raises what the endpoint raises, or:

        QueueFull at once; RequestTimeout; ServiceUnavailable; ActorDied if `max_attempts`
        replicas died under it.
        """
        queued = self._homeless + sum(replica.slots.waiting for replica in self.replicas)
        if queued >= self.cfg.max_queued_requests:
            raise QueueFull(
                f"{self.name}.{endpoint}: {queued} requests wait already "
                f"(max_queued_requests = {self.cfg.max_queued_requests})"
            )
        deadline = time.monotonic() + self.cfg.request_timeout_s
        deaths = 0
        while True:
            replica = await self._pick(endpoint, session_id, deadline)
            try:
                return await replica.request(endpoint, args, kwargs, deadline)
            except ReplicaLost as error:
                self._notice(replica, str(error))
                deaths += error.started
                if deaths >= self.cfg.max_attempts:
                    raise ActorDied(
                        f"{self.name}.{endpoint}: {deaths} replicas died under this request "
                        f"(max_attempts = {self.cfg.max_attempts}); last: {error}"
                    ) from error
                log.warning("%s.%s: %s; trying again", self.name, endpoint, error)

    async def fanout(self, endpoint: str, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        """Runs a request on every healthy replica, past the queues; results in replica order.

        A replica that dies meanwhile has None in its place. What an endpoint raises is raised here
        when all have ended.
        """
        deadline = time.monotonic() + self.cfg.request_timeout_s
        await self._wait_healthy(endpoint, deadline)
        replicas = [replica for replica in self.replicas if replica.healthy]
        calls = (replica.call(endpoint, args, kwargs, deadline) for replica in replicas)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for position, (replica, result) in enumerate(zip(replicas, results, strict=True)):
            if isinstance(result, ReplicaLost):
                self._notice(replica, str(result))
                log.warning("%s.%s (fanout): %s", self.name, endpoint, result)
                results[position] = None
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def _pick(self, endpoint: str, session_id: str | None, deadline: float) -> Replica:
        await self._wait_healthy(endpoint, deadline)
        healthy = [replica for replica in self.replicas if replica.healthy]
        if session_id is not None:
            return self.sessions.pick(healthy, session_id)
        return self._router.pick(healthy)

    async def _wait_healthy(self, endpoint: str, deadline: float) -> None:
        """Returns once a replica is healthy, with no await between that and the return."""
        if any(replica.healthy for replica in self.replicas) and not self._stopped:
            return
        what = f"{self.name}.{endpoint}"
        limit = min(deadline, time.monotonic() + self.cfg.unavailable_timeout_s)
        self._homeless += 1
        try:
            while self._stopped or not any(replica.healthy for replica in self.replicas):
                if self._stopped:
                    raise ServiceUnavailable(f"{what}: the service is shut down")
                if all(replica.state is ReplicaState.FAILED for replica in self.replicas):
                    raise ServiceUnavailable(
                        f"{what}: no replica could be respawned; last error: {self._last_error!r}"
                    ) from self._last_error
                self._notice_dead()
                self._changed.clear()
                await asyncio.wait_for(self._changed.wait(), limit - time.monotonic())
        except TimeoutError as error:
            if limit == deadline:
                raise RequestTimeout(
                    f"{what}: no healthy replica within {self.cfg.request_timeout_s:g} s"
                ) from error
            raise ServiceUnavailable(
                f"{what}: no healthy replica within {self.cfg.unavailable_timeout_s:g} s "
                f"(unavailable_timeout_s); last error: {self._last_error!r}"
            ) from error
        finally:
            self._homeless -= 1

    # health

    async def _watch_health(self) -> None:
        while not self._stopped:
            self._notice_dead()
            await asyncio.sleep(self.cfg.health_poll_rate)

    def _notice_dead(self) -> None:
        for replica in self.replicas:
            if replica.state is ReplicaState.HEALTHY and replica.dead:
                self._notice(replica, f"process died (pids {replica.pids()})")

    def _notice(self, replica: Replica, reason: str) -> None:
        """Takes a lost replica out of service and begins to respawn it."""
        if self._stopped or replica.state is not ReplicaState.HEALTHY:
            return
        log.warning("%s replica %d is lost: %s", self.name, replica.idx, reason)
        replica.lose(reason)
        self._respawn_tasks[replica.idx] = asyncio.create_task(self._respawn(replica))

    async def _respawn(self, replica: Replica) -> None:
        backoff = FIRST_BACKOFF_S
        for attempt in range(1, MAX_FAILED_RESPAWNS + 1):
            try:
                await replica.bury()
                await replica.launch()
                for callback in self._callbacks:
                    outcome = callback(replica.idx, replica.actor)
                    if inspect.isawaitable(outcome):
                        await asyncio.wait_for(outcome, self.cfg.spawn_timeout_s)
            except Exception as error:
                self._last_error = error
                log.exception("%s replica %d: respawn %d failed", self.name, replica.idx, attempt)
                await asyncio.sleep(backoff)
                backoff *= 2
            else:
                replica.state = ReplicaState.HEALTHY
                replica.respawns += 1
                log.info("%s replica %d is back: pids %s", self.name, replica.idx, replica.pids())
                break
        else:
            replica.state = ReplicaState.FAILED
        self._changed.set()

    async def stop(self) -> None:
        """Ends all replicas; waiting requests raise ServiceUnavailable."""
        self._stopped = True
        self._changed.set()
        tasks = [*self._respawn_tasks.values()]
        if self._health_task is not None:
            tasks.append(self._health_task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in self.replicas:
            replica.lose("the service is shutting down")
            replica.state = ReplicaState.STOPPED
        await asyncio.gather(*(replica.bury() for replica in self.replicas))
