"""How far rollouts may run ahead of training.

GRPO with `off_by_n` trains step s (making version s + 1) on episodes of version s - off_by_n or
newer. What is generated beyond that is evicted from the replay buffer unread: wasted work, on the
processors that the trainer needs. While the generator serves version v, its episodes can be trained
on up to step v + off_by_n, so all episodes ever started are bounded by

    (v + off_by_n + 1) * batch_size

With `off_by_n = 0` this is the synchronous loop: after a batch has been taken, nothing may start
until the next version serves.
"""

from __future__ import annotations

import asyncio


def oldest_usable(step: int, steps: int, publish_every: int, off_by_n: int) -> int:
    """The oldest version that may serve after training step `step`: what it generates until the
    next publish must still be young enough for the last step before that one's version serves."""
    next_publish = min(step + publish_every - step % publish_every, steps)
    return next_publish - 1 - off_by_n


class RolloutBudget:
    """Counts episodes: taken by training, waiting in the buffer, in flight.

    Called in this order::

        rollout task:   await budget.acquire(group_size) -> generate -> budget.delivered(group_size)
        training loop:  batch = sample();  await budget.taken(batch_size)
                        sample() is None -> await budget.reclaim_evicted()
                        after a publish: await budget.serves(version)
    """

    def __init__(self, batch_size: int, off_by_n: int, step: int = 0, version: int = 0) -> None:
        """`batch_size`: episodes per training step; `off_by_n`: allowed policy age in steps;
        `step`, `version`: where a resumed run stands."""
        self._batch_size = batch_size
        self._off_by_n = off_by_n
        self._taken = step * batch_size
        self._version = version
        self._in_flight = 0
        self._waiting = 0
        self._blocked = 0
        self._changed = asyncio.Condition()

    async def acquire(self, episodes: int) -> None:
        """Wait until `episodes` more may be generated. A group larger than what is left of the
        bound goes through alone, so that no group size can block for ever."""

        def fits() -> bool:
            started = self._taken + self._waiting + self._in_flight
            bound = (self._version + self._off_by_n + 1) * self._batch_size
            alone = self._waiting + self._in_flight == 0
            return started + episodes <= bound or (alone and started < bound)

        async with self._changed:
            self._blocked += 1
            try:
                await self._changed.wait_for(fits)
            finally:
                self._blocked -= 1
            self._in_flight += episodes

    async def delivered(self, episodes: int, kept: int) -> None:
        """`episodes` left flight, `kept` of which are now in the replay buffer."""
        async with self._changed:
            self._in_flight -= episodes
            self._waiting += kept
            self._changed.notify_all()

    async def taken(self, episodes: int) -> None:
        """Training took `episodes` from the buffer."""
        async with self._changed:
            self._taken += episodes
            # May go below zero for a moment: a group's first episodes can be taken before the
            # whole group is `delivered`; until then they count as in flight.
            self._waiting -= episodes
            self._changed.notify_all()

    async def serves(self, version: int) -> None:
        """New requests are answered by `version`."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    async def reclaim_evicted(self) -> None:
        """Call when the buffer had too little for a batch. If rollouts are blocked although nothing
        is in flight, what counts as waiting was evicted as too old: it is made up for."""
        async with self._changed:
            if self._blocked and not self._in_flight and self._waiting > 0:
                self._waiting = 0
                self._changed.notify_all()
