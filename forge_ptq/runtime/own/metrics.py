"""Metrics of one process: recording, accumulating, handing over, and merging across processes.

`record_metric` works in every process and thread. What it records stays in the process' collector
until the metric logger collects it. States, not values, are merged: a mean over processes is
weighted by their counts, and a standard deviation is that of all values together.

A hand-over may get lost (a deadline passes, the logger moves on). So the collector keeps the last
batch until the next collection acknowledges its number, and otherwise folds it back in: no value is
lost and none is counted twice.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

MAX_RAW_SAMPLES = 10_000
"""Raw samples kept between two collections (logging mode per_rank_no_reduce); older ones go."""


class Reduce(Enum):
    """How the values recorded under one key within one step become one number."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    STD = "std"


@dataclass
class Metric:
    """One recorded or reduced value. `timestamp` is in seconds since the epoch (UTC)."""

    key: str
    value: float
    reduction: Reduce
    timestamp: float = field(default_factory=time.time)


@dataclass
class Accumulator:
    """Sufficient statistics for every reduction; merging is associative and commutative.

    `m2` is the sum of squared deviations from the mean (Welford), which keeps the standard
    deviation exact where a sum of squares would cancel.
    """

    reduction: str
    count: int = 0
    total: float = 0.0
    m2: float = 0.0
    high: float = -math.inf
    low: float = math.inf

    def add(self, value: float) -> None:
        """Takes in one value."""
        self.merge(Accumulator(self.reduction, 1, value, 0.0, value, value))

    def merge(self, other: Accumulator) -> None:
        """Takes in another accumulator of the same key; raises ValueError if reductions differ."""
        if other.reduction != self.reduction:
            raise ValueError(f"one key, two reductions: {self.reduction} and {other.reduction}")
        if other.count == 0:
            return
        if self.count:
            delta = other.total / other.count - self.total / self.count
            n = self.count + other.count
            self.m2 += other.m2 + delta * delta * self.count * other.count / n
        else:
            self.m2 = other.m2
        self.count += other.count
        self.total += other.total
        self.high = max(self.high, other.high)
        self.low = min(self.low, other.low)

    def value(self) -> float:
        """The reduced value; 0.0 where nothing was recorded. STD is the population's."""
        if self.count == 0:
            return 0.0
        return {
            "mean": self.total / self.count,
            "sum": self.total,
            "max": self.high,
            "min": self.low,
            "std": math.sqrt(max(self.m2, 0.0) / self.count),
        }[self.reduction]


States = dict[str, Accumulator]


def merge_states(into: States, other: States) -> None:
    """Merges `other` into `into`. Raises ValueError naming a key with two reductions."""
    for key, accumulator in other.items():
        mine = into.setdefault(key, Accumulator(accumulator.reduction))
        try:
            mine.merge(accumulator)
        except ValueError as error:
            raise ValueError(f"metric {key!r}: {error}") from error


def reduce_states(states: Iterable[States]) -> dict[str, float]:
    """Reduces the states of many processes to one value per key, keys sorted."""
    merged: States = {}
    for state in states:
        merge_states(merged, state)
    return {key: merged[key].value() for key in sorted(merged)}


class MetricCollector:
    """Everything recorded in this process since the last acknowledged collection. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: States = {}
        self._raw: list[Metric] = []
        self._keep_raw = False
        self._sent: dict[str, Any] | None = None
        self._number = 0

    def push(self, metric: Metric) -> None:
        """Takes in one value; raises ValueError if the key was recorded with another reduction."""
        with self._lock:
            reduction = metric.reduction.value
            accumulator = self._states.setdefault(metric.key, Accumulator(reduction))
            if accumulator.reduction != reduction:
                raise ValueError(
                    f"metric {metric.key!r}: recorded as {accumulator.reduction} before, "
                    f"now as {reduction}"
                )
            accumulator.add(metric.value)
            if self._keep_raw:
                self._raw.append(metric)
                del self._raw[:-MAX_RAW_SAMPLES]

    def collect(self, acknowledged: int, keep_raw: bool = False) -> dict[str, Any]:
        """Hands over {number, states, raw}. `acknowledged`: the last number that the caller has."""
        with self._lock:
            if self._sent is not None and self._sent["number"] != acknowledged:
                lost: States = self._sent["states"]
                merge_states(lost, self._states)
                self._states = lost
                self._raw = (self._sent["raw"] + self._raw)[-MAX_RAW_SAMPLES:]
            self._number += 1
            self._sent = {"number": self._number, "states": self._states, "raw": self._raw}
            self._states, self._raw, self._keep_raw = {}, [], keep_raw
            return self._sent


COLLECTOR = MetricCollector()


def record_metric(key: str, value: Any, reduction: Reduce = Reduce.MEAN) -> None:
    """Records `value` (a number or a one-element tensor) under `key` for the current step.

    Does nothing if FORGE_DISABLE_METRICS is true. Raises TypeError/ValueError naming the key.
    """
    if os.environ.get("FORGE_DISABLE_METRICS", "false").lower() == "true":
        return
    if isinstance(reduction, str):
        reduction = Reduce(reduction)
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(value).__name__
        raise TypeError(f"metric {key!r}: expected one number, got {kind}") from error
    COLLECTOR.push(Metric(key, number, reduction))
