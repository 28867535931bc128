"""The companion of what serves is made after publish or a rollback has returned, and given to a
replica that has come back.

Rollouts go on meanwhile. It takes the publisher's lock, so nothing else is staged before it is
done; if a publish comes first, what is made is the companion of what serves then.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from forge_ptq.artifact import ArtifactRef

log = logging.getLogger(__name__)


class Accompanying:
    """serving: serving.Serving. fleet: fleet.QuantizerFleet. lock: of whatever fills idle slots."""

    def __init__(self, serving: Any, fleet: Any, lock: asyncio.Lock) -> None:
        self._serving = serving
        self._fleet = fleet
        self._lock = lock
        self._tasks: list[asyncio.Task[ArtifactRef | None]] = []
        """The last one, and one before it that may still hold the lock."""
        self._waiting = False
        """Whether the last one still waits for the lock."""
        self._replica: Any = None
        """Of the one that waits."""
        self._closed = False

    def begin(self, replica: Any = None) -> None:
        """Once the lock is free. replica: the actor that alone lacks it. While one still waits for
        the lock there is no second: the one is for all replicas then, if not for the same."""
        if self._closed:
            return
        if not self._waiting:
            self._replica, self._waiting = replica, True
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tasks.append(asyncio.create_task(self._run()))
        elif replica is not self._replica:
            self._replica = None

    async def _run(self) -> ArtifactRef | None:
        async with self._lock:
            self._waiting = False
            try:
                return await self._serving.accompany(self._fleet, self._replica)
            except Exception:
                log.exception("the companion could not be made")
                return None

    async def settled(self) -> ArtifactRef | None:
        """Waits until none is being made; the last one, None if it could not be made."""
        while making := [task for task in self._tasks if not task.done()]:
            await asyncio.wait(making)
        if not self._tasks or self._tasks[-1].cancelled():
            return None
        return self._tasks[-1].result()

    async def close(self, timeout_s: float) -> None:
        """Cancel what is being made; none is made any more."""
        self._closed = True
        if not self._tasks:
            return
        for task in self._tasks:
            task.cancel()
        if (await asyncio.wait(self._tasks, timeout=timeout_s))[1]:
            log.warning("a companion was still being made when PTQ closed")
