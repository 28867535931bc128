"""`Tracer`: wall-clock durations of the steps of a recurring piece of work, as metrics."""

from __future__ import annotations

import time
from typing import Any

from forge_ptq.runtime.own.metrics import Reduce, record_metric


class Tracer:
    """
    tracer = Tracer("trainer")
    tracer.start(); ...; tracer.step("forward"); ...; tracer.step("backward"); tracer.stop()

    records trainer/forward/duration_avg_s and ..._max_s, the same for backward, and
    trainer/total_duration_avg_s and ..._max_s; seconds. `track_memory` and `timer` are accepted for
    torchforge's signature; time is always the monotonic clock's.
    """

    def __init__(self, prefix: str, track_memory: bool = False, timer: str = "cpu") -> None:
        if timer not in ("cpu", "gpu"):
            raise ValueError(f"Tracer.timer = {timer!r}: expected cpu or gpu")
        self.prefix = prefix
        self._started: float | None = None
        self._last = 0.0
        self._steps: list[tuple[str, float]] = []

    def start(self) -> None:
        """Begins; RuntimeError if already begun."""
        if self._started is not None:
            raise RuntimeError(f"Tracer {self.prefix!r}: start() called twice")
        self._started = self._last = time.perf_counter()
        self._steps = []

    def step(self, name: str) -> None:
        """Ends one step: the time since the previous step (or start)."""
        if self._started is None:
            raise RuntimeError(f"Tracer {self.prefix!r}: step() before start()")
        now = time.perf_counter()
        self._steps.append((name, now - self._last))
        self._last = now

    def stop(self) -> None:
        """Ends and records."""
        if self._started is None:
            raise RuntimeError(f"Tracer {self.prefix!r}: stop() before start()")
        self._record("total", time.perf_counter() - self._started, separator="_")
        for name, seconds in self._steps:
            self._record(name, seconds, separator="/")
        self._started = None

    def _record(self, name: str, seconds: float, separator: str) -> None:
        key = f"{self.prefix}/{name}{separator}duration"
        record_metric(f"{key}_avg_s", seconds, Reduce.MEAN)
        record_metric(f"{key}_max_s", seconds, Reduce.MAX)

    def __enter__(self) -> Tracer:
        self.start()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.stop()
