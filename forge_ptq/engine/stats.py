"""Times of engine steps, and how long admitted sequences waited between two of their steps."""

from __future__ import annotations

import statistics
from collections import deque

RECENT_STEPS = 512


class StepStats:
    """Per lane: since when its sequences wait. All times are ``time.perf_counter`` seconds.

    ``pause_s`` is the longest wait of any lane with generate requests since ``begin_window``; the
    other lane's steps, staging work and flips in between all count.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.pause_s = 0.0
        self.longest_pause_s = 0.0
        self._step_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._waiting_since: list[float | None] = [None, None]
        self._median: tuple[int, float] = (0, 0.0)  # step count when taken, seconds

    def begin_window(self) -> None:
        """Start measuring ``pause_s`` anew."""
        self.pause_s = 0.0

    def admitted(self, slot: int, now: float) -> None:
        """A generate request joined a lane."""
        if self._waiting_since[slot] is None:
            self._waiting_since[slot] = now

    def stepped(self, slot: int, started: float, ended: float, still_waiting: bool) -> None:
        """A step of ``slot`` that served generate requests ran from started to ended."""
        self.steps += 1
        self._step_s.append(ended - started)
        since = self._waiting_since[slot]
        if since is not None:
            self.pause_s = max(self.pause_s, started - since)
            self.longest_pause_s = max(self.longest_pause_s, started - since)
        self._waiting_since[slot] = ended if still_waiting else None

    def left(self, slot: int) -> None:
        """A lane's last generate request was aborted."""
        self._waiting_since[slot] = None

    def step_s_median(self) -> float:
        """Median duration of the recent serving steps, 0.0 before the first."""
        if not self._step_s:
            return 0.0
        if self.steps - self._median[0] >= min(32, 1 + self.steps // 4):
            self._median = (self.steps, statistics.median(self._step_s))
        return self._median[1]
