"""Which replica gets a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Loaded(Protocol):
    """What routing needs to know of a replica."""

    @property
    def idx(self) -> int:
        """Number of the replica within its service."""

    @property
    def load(self) -> int:
        """Requests that the replica works on or holds in its queue."""


R = TypeVar("R", bound=Loaded)


class RoundRobinRouter:
    """Each replica in turn; one that is missing is passed over without disturbing the turn."""

    def __init__(self) -> None:
        self._last = -1

    def pick(self, replicas: Sequence[R]) -> R:
        """The next of `replicas`, which must be ordered by idx and not empty."""
        chosen = next((r for r in replicas if r.idx > self._last), replicas[0])
        self._last = chosen.idx
        return chosen


class LeastLoadedRouter:
    """The replica with the fewest requests; the lowest idx of equals."""

    def pick(self, replicas: Sequence[R]) -> R:
        """The least loaded of `replicas`, which must not be empty."""
        return min(replicas, key=lambda r: (r.load, r.idx))


class SessionRouter:
    """Requests of one session go to one replica for as long as it lives; then to another."""

    def __init__(self) -> None:
        self._fallback = LeastLoadedRouter()
        self.assigned: dict[str, int] = {}

    def open(self, session_id: str) -> None:
        """Makes a session known; it is bound to a replica at its first request."""
        self.assigned[session_id] = -1

    def close(self, session_id: str) -> None:
        """Forgets a session."""
        self.assigned.pop(session_id, None)

    def pick(self, replicas: Sequence[R], session_id: str) -> R:
        """The session's replica, or the least loaded one if it has none among `replicas`.

        Raises KeyError for a session that was never opened or is closed.
        """
        if session_id not in self.assigned:
            raise KeyError(f"session {session_id!r} is not open")
        bound = self.assigned[session_id]
        for replica in replicas:
            if replica.idx == bound:
                return replica
        chosen = self._fallback.pick(replicas)
        self.assigned[session_id] = chosen.idx
        return chosen
