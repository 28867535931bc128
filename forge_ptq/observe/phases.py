"""Seconds per phase in constant memory, however often the phase recurs."""

from __future__ import annotations

from collections import deque

SAMPLE = 512
"""Newest durations of a phase that its median is taken over."""


class PhaseTimes:
    """Durations of one phase, in seconds. Not thread-safe."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._count = 0
        self._longest = 0.0
        self._newest: deque[float] = deque(maxlen=SAMPLE)

    def add(self, seconds: float) -> None:
        """One more pass through the phase."""
        self._seconds += seconds
        self._count += 1
        self._longest = max(self._longest, seconds)
        self._newest.append(seconds)

    def summary(self) -> dict[str, float]:
        """Sum, count and maximum of all durations; median of the newest `SAMPLE`."""
        return {
            "seconds": round(self._seconds, 3),
            "count": self._count,
            "median_s": round(sorted(self._newest)[len(self._newest) // 2], 4),
            "max_s": round(self._longest, 4),
        }
