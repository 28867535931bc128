"""`MetricLogger`: collects what all processes recorded, reduces it, and feeds the backends.

It lives in the client, next to the console, and talks to the agents of the spawned processes. A
process that does not answer in time (or died) is left out of that step; its values come with the
next one, unless it is dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from forge_ptq.runtime.own.backends import Backend, make_backend
from forge_ptq.runtime.own.death import ProcessId
from forge_ptq.runtime.own.handle import ProcessRef, call_watched
from forge_ptq.runtime.own.metrics import COLLECTOR, States, reduce_states
from forge_ptq.runtime.own.process import ProcessGroup
from forge_ptq.runtime.own.provisioner import current_provisioner
from forge_ptq.runtime.own.types import ActorDied, RequestTimeout

log = logging.getLogger(__name__)

COLLECT_TIMEOUT_S = 5.0
Batch = dict[str, Any]


class LocalEndpoint:
    """Gives a coroutine function the call_one() and call() of an actor's endpoint."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def call_one(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return await self._function(*args, **kwargs)

    call = call_one


class MetricLogger:
    """Endpoints `init_backends(config)`, `flush(step) -> dict`, `shutdown()`."""

    def __init__(self, process_name: str) -> None:
        self.process_name = process_name
        self.init_backends = LocalEndpoint(self._init_backends)
        self.flush = LocalEndpoint(self._flush)
        self.shutdown = LocalEndpoint(self._shutdown)
        self._backends: dict[str, tuple[str, Backend]] = {}
        self._acknowledged: dict[tuple[str, int], int] = {}
        self._lock = asyncio.Lock()

    async def _init_backends(self, config: dict[str, Any]) -> None:
        """Opens the backends of `metric_logging`: {console: {...}, wandb: {...}}."""
        made = {name: make_backend(name, dict(cfg or {})) for name, cfg in config.items()}
        for name, (mode, backend) in made.items():
            await backend.start()
            self._backends[name] = (mode, backend)
        if self._keep_raw:
            await self._collect()  # from now on every process keeps raw samples

    @property
    def _keep_raw(self) -> bool:
        return any(mode == "per_rank_no_reduce" for mode, _ in self._backends.values())

    async def _flush(self, step: int) -> dict[str, float]:
        """Ends a step: returns the reduced metrics of all processes, keys sorted."""
        async with self._lock:
            batches = await self._collect()
            reduced = reduce_states(batch["states"] for batch in batches)
            for name, (mode, backend) in list(self._backends.items()):
                try:
                    await self._feed(mode, backend, step, reduced, batches)
                except (ActorDied, RequestTimeout):
                    del self._backends[name]
                    log.exception("metric backend %s is lost; the run goes on without it", name)
            return reduced

    @staticmethod
    async def _feed(
        mode: str, backend: Backend, step: int, reduced: dict[str, float], batches: list[Batch]
    ) -> None:
        if mode == "global_reduce":
            await backend.log(step, reduced)
        elif mode == "per_rank_reduce":
            values = {
                f"{batch['process']}/{key}": value
                for batch in batches
                for key, value in reduce_states([batch["states"]]).items()
            }
            await backend.log(step, values)
        else:
            for batch in batches:
                for metric in batch["raw"]:
                    key = f"{batch['process']}/{metric.key}"
                    await backend.log(None, {key: metric.value, "timestamp": metric.timestamp})

    async def _collect(self) -> list[Batch]:
        client = (f"{self.process_name}_r0", 0)
        mine: Batch = COLLECTOR.collect(self._acknowledged.get(client, 0), self._keep_raw)
        self._acknowledged[client] = mine["number"]
        provisioner = current_provisioner()
        groups = provisioner.groups if provisioner is not None else []
        answers = await asyncio.gather(
            *(
                self._collect_from(group, rank)
                for group in groups
                for rank in range(len(group.ref.pids))
            )
        )
        return [{"process": client[0], **mine}, *(answer for answer in answers if answer)]

    async def _collect_from(self, group: ProcessGroup, rank: int) -> Batch | None:
        pid = group.ref.pids[rank]
        key = (group.name, pid)
        watched: tuple[ProcessId, ...] = tuple(p for p in group.ref.watched if p.pid == pid)
        process = ProcessRef(group.name, (pid,), watched)
        try:
            batch: Batch = await call_watched(
                group.agent(rank).collect.call_one(self._acknowledged.get(key, 0), self._keep_raw),
                processes=process,
                what=f"metrics of {group.name} rank {rank}",
                timeout_s=COLLECT_TIMEOUT_S,
            )
        except (ActorDied, RequestTimeout) as error:
            log.warning("a process is missing in this step's metrics: %s", error)
            return None
        self._acknowledged[key] = batch["number"]
        return batch

    async def _shutdown(self) -> None:
        """Closes the backends."""
        backends, self._backends = self._backends, {}
        for name, (_, backend) in backends.items():
            try:
                await backend.finish()
            except (ActorDied, RequestTimeout):
                log.exception("metric backend %s could not be closed", name)


_logger: MetricLogger | None = None


async def get_or_create_metric_logger(
    proc_mesh: Any = None, process_name: str = "Controller"
) -> MetricLogger:
    """The client's metric logger. (`proc_mesh` is accepted for torchforge's signature.)"""
    global _logger
    if _logger is None:
        _logger = MetricLogger(process_name)
    return _logger


async def close_metric_logger() -> None:
    """Closes the backends and forgets the logger; part of shutdown()."""
    global _logger
    logger, _logger = _logger, None
    if logger is not None:
        await logger.shutdown.call_one()


__all__ = ["MetricLogger", "States", "close_metric_logger", "get_or_create_metric_logger"]
