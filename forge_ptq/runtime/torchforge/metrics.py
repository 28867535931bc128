"""torchforge's metric logger, whose flush also returns what it reduced."""

from __future__ import annotations

from typing import Any

from forge.observability import metric_actors

from forge_ptq.runtime.own.start import start_monarch

_last_reduced: dict[str, float] = {}
"""Result of the latest reduction. torchforge's logging actor runs in the client's process."""

_reduce = metric_actors.reduce_metrics_states


def _reduce_and_remember(states: list[dict[str, Any]]) -> list[Any]:
    metrics = _reduce(states)
    _last_reduced.clear()
    _last_reduced.update({metric.key: metric.value for metric in metrics})
    return metrics


metric_actors.reduce_metrics_states = _reduce_and_remember


class FlushEndpoint:
    """`call_one(step)` of torchforge's logger; returns the reduced metrics, keys sorted.

    The result is empty unless a backend has logging_mode global_reduce (torchforge reduces in one
    place only then).
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    async def call_one(self, step: int) -> dict[str, float]:
        """Ends a step."""
        _last_reduced.clear()
        await self._logger.flush.call_one(step)
        return dict(sorted(_last_reduced.items()))


class MetricLogger:
    """torchforge's GlobalLoggingActor; all endpoints but flush are its own."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self.flush = FlushEndpoint(logger)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)


async def get_or_create_metric_logger(
    proc_mesh: Any = None, process_name: str = "Controller"
) -> MetricLogger:
    """The client's metric logger."""
    start_monarch()
    logger = await metric_actors.get_or_create_metric_logger(proc_mesh, process_name)
    return MetricLogger(logger)
