"""Notices within 0.1 s that a local process has died.

Monarch's supervision needs one to ten seconds for it and says nothing about which process. One
daemon thread reads /proc/PID/stat of all watched processes; it runs only while somebody watches.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.1
Callback = Callable[[int], None]


@dataclass(frozen=True)
class ProcessId:
    """A pid together with its start time (clock ticks since boot), so that reuse is noticed."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Identity of a running process; start time 0 (never alive) if there is none."""
        stat = _read_stat(pid)
        return cls(pid, int(stat[19]) if stat else 0)

    def alive(self) -> bool:
        """Whether that very process still runs; a zombie does not."""
        stat = _read_stat(self.pid)
        return stat is not None and stat[0] not in "ZX" and int(stat[19]) == self.start_ticks


def _read_stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from `state` on, or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


class DeathWatch:
    """Calls back, from its own thread, when a watched process dies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[ProcessId, list[Callback]] = {}
        self._running = False

    def subscribe(self, processes: tuple[ProcessId, ...], callback: Callback) -> None:
        """Calls `callback(pid)` once for each of `processes` that dies, until unsubscribed."""
        with self._lock:
            for process in processes:
                self._watched.setdefault(process, []).append(callback)
            if processes and not self._running:
                self._running = True
                threading.Thread(target=self._run, name="death-watch", daemon=True).start()

    def unsubscribe(self, processes: tuple[ProcessId, ...], callback: Callback) -> None:
        """Ends a subscription; harmless if it has already fired."""
        with self._lock:
            for process in processes:
                callbacks = self._watched.get(process, [])
                if callback in callbacks:
                    callbacks.remove(callback)
                if not callbacks:
                    self._watched.pop(process, None)

    def _run(self) -> None:
        while True:
            with self._lock:
                watched = list(self._watched)
                if not watched:
                    self._running = False
                    return
            for process in watched:
                if not process.alive():
                    with self._lock:
                        callbacks = self._watched.pop(process, [])
                    for callback in callbacks:
                        callback(process.pid)
            time.sleep(POLL_S)


WATCH = DeathWatch()
