"""Coordinator: the actor that replicas pull work from. A clock and a door around WorkRound.

    await coordinator.open_round.call_one(round_id, items, terms)
    report = await coordinator.wait.call_one(round_id, 1.0)     # None: not over yet, ask again
    report = await coordinator.close.call_one(round_id)

and each replica, until the claim is None:

    claim = await coordinator.claim.call_one(round_id, member)
    await coordinator.beat.call_one(round_id, member.id, progress)
    await coordinator.finish.call_one(round_id, member.id, item_id, result)

It does no work of its own, so it always answers. It holds the results of a round (small things, or
hidden states of probes) until the round is closed; statistics and tensors of artifacts go to the
store. A round that was closed, or never opened here, is over for whoever asks.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_ptq.runtime import ForgeActor, concurrent_endpoint
from forge_ptq.services.round import WAIT, Assignment, Item, Outcome, Wait, WorkRound


@dataclass(frozen=True)
class Member:
    """A replica that takes part: one process, or the ranks of a tensor-parallel group."""

    id: str
    """Unique among all replicas ever, so that a respawned one is a new one."""
    host: str
    pids: tuple[int, ...]


@dataclass(frozen=True)
class Terms:
    """The times of a round, in seconds."""

    heartbeat_s: float
    deadline_s: float


@dataclass
class Report:
    """Outcome of a round, and who the replicas in it are."""

    outcome: Outcome
    members: dict[str, Member]
    ages: dict[str, float]
    """Seconds since each member was last heard of."""


@dataclass
class _Open:
    """A round that is not closed yet."""

    round: WorkRound
    members: dict[str, Member] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Coordinator(ForgeActor):
    """See the module's docstring. One process, light enough to share it."""

    def __init__(self) -> None:
        super().__init__()
        self._rounds: dict[str, _Open] = {}
        self._heard: dict[str, float] = {}
        """Replica -> when it last said anything, about whatever round."""

    @concurrent_endpoint
    async def open_round(self, round_id: str, items: Sequence[Item], terms: Terms) -> None:
        """Begin a round; ValueError if there is one of this id."""
        if round_id in self._rounds:
            raise ValueError(f"round {round_id} is open already")
        now = time.monotonic()
        self._rounds[round_id] = _Open(WorkRound(items, terms.heartbeat_s, terms.deadline_s, now))

    @concurrent_endpoint
    async def claim(self, round_id: str, member: Member) -> Assignment | Wait | None:
        """The next item for an idle replica; waits for one for up to half a heartbeat.

        WAIT: ask again at once. None: the round is over.
        """
        started = time.monotonic()
        while True:
            entry = self._rounds.get(round_id)
            if entry is None:
                return None
            self._heard[member.id] = max(started, self._heard.get(member.id, started))
            entry.members[member.id] = member
            now = time.monotonic()
            answer = entry.round.claim(member.id, now)
            if answer is not WAIT or now - started >= entry.round.heartbeat_s / 2:
                return answer
            await self._change(entry, entry.round.heartbeat_s / 8)

    @concurrent_endpoint
    async def beat(self, round_id: str, replica: str, progress: int) -> bool:
        """False: nobody needs the replica's item any more."""
        self._heard[replica] = time.monotonic()
        entry = self._rounds.get(round_id)
        return entry is not None and entry.round.beat(replica, time.monotonic(), progress)

    @concurrent_endpoint
    async def finish(self, round_id: str, replica: str, item_id: str, result: Any) -> bool:
        """Hand in a result; False if it does not count."""
        self._heard[replica] = time.monotonic()
        entry = self._rounds.get(round_id)
        if entry is None:
            return False
        counts = entry.round.finish(replica, item_id, result, time.monotonic())
        entry.changed.set()
        return counts

    @concurrent_endpoint
    async def fail(self, round_id: str, replica: str, item_id: str, error: str) -> None:
        """Report that an item raised."""
        self._heard[replica] = time.monotonic()
        entry = self._rounds.get(round_id)
        if entry is not None:
            entry.round.fail(replica, item_id, error, time.monotonic())
            entry.changed.set()

    @concurrent_endpoint
    async def wait(self, round_id: str, timeout_s: float) -> Report | None:
        """The report as soon as the round is over; None if it is not within timeout_s."""
        until = time.monotonic() + timeout_s
        entry = self._entry(round_id)
        while not entry.round.over(now := time.monotonic()):
            if now >= until:
                return None
            await self._change(entry, min(until, entry.round.deadline) - now)
        return self._report(entry)

    @concurrent_endpoint
    async def close(self, round_id: str) -> Report:
        """Forget a round, over or not; replicas that are still at it will be told to drop it."""
        entry = self._entry(round_id)
        del self._rounds[round_id]
        entry.changed.set()
        return self._report(entry)

    @concurrent_endpoint
    async def ages(self, replicas: Sequence[str]) -> dict[str, float]:
        """Seconds since each of these replicas was last heard of, rounds that are over included."""
        return self._ages(replicas)

    def _ages(self, replicas: Iterable[str]) -> dict[str, float]:
        now = time.monotonic()
        return {replica: now - self._heard.get(replica, -math.inf) for replica in replicas}

    def _entry(self, round_id: str) -> _Open:
        if round_id not in self._rounds:
            raise ValueError(f"there is no open round {round_id}")
        return self._rounds[round_id]

    def _report(self, entry: _Open) -> Report:
        outcome = entry.round.outcome(time.monotonic())
        return Report(outcome, dict(entry.members), self._ages(entry.members))

    @staticmethod
    async def _change(entry: _Open, timeout_s: float) -> None:
        """Return when something was reported to the round, or after timeout_s."""
        entry.changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await entry.changed.wait()
        except TimeoutError:
            return
