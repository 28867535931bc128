"""How far rollouts may run ahead of training.

GRPO with `off_by_n` trains step s on episodes whose policy version is at least s - off_by_n. An
episode that waits longer is evicted from the replay buffer unread, so generating it was wasted
work. `RolloutBudget` bounds the episodes that are in flight or waiting to `off_by_n + 1` training
batches: the generator then never runs further ahead than the trainer can use, and with
`off_by_n = 0` the loop is synchronous, because the budget of a batch comes back only when the next
version has been published.
"""

from __future__ import annotations

import asyncio


class RolloutBudget:
    """A counting budget of episodes, shared by the rollout tasks and the training loop.

    Called in this order::

        rollout task:   await budget.acquire(group_size) -> generate -> budget.delivered(group_size)
        training loop:  batch = sample();  budget.release(batch_size) once rollouts may replace it
                        sample() is None -> budget.reclaim_evicted()
    """

    def __init__(self, batch_size: int, off_by_n: int) -> None:
        """`batch_size`: episodes per training step; `off_by_n`: allowed policy age in steps."""
        self.capacity = batch_size * (off_by_n + 1)
        self._in_flight = 0
        self._waiting = 0
        self._blocked = 0
        self._changed = asyncio.Condition()

    async def acquire(self, episodes: int) -> None:
        """Wait until `episodes` more may be generated. A group larger than the whole budget is let
        through alone, so that no configuration can block for ever."""

        def fits() -> bool:
            used = self._in_flight + self._waiting
            return used == 0 or used + episodes <= self.capacity

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

    async def release(self, episodes: int) -> None:
        """A batch of `episodes` was trained on; as many may be generated anew."""
        async with self._changed:
            self._waiting = max(0, self._waiting - episodes)
            self._changed.notify_all()

    async def reclaim_evicted(self) -> None:
        """Call when the buffer had too little for a batch. If rollouts are blocked although nothing
        is in flight, what counts as waiting was evicted as too old: its budget comes back."""
        async with self._changed:
            if self._blocked and not self._in_flight:
                self._waiting = 0
                self._changed.notify_all()
