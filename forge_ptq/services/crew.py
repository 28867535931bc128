"""Crew: all Quantizer replicas, of one service or of several, brought together for rounds.

    crew = Crew([quantizer], coordinator, heartbeat_s=2)
    report = await crew.hold("observe", items, deadline_s=120)

``hold`` opens a round, asks every replica to work in it, and waits for the coordinator, never for a
replica: calls to replicas run in the background, and a replica that does not return is left behind.
One that is respawned meanwhile is asked to join. Afterwards a replica that has fallen silent
(stopped, or stuck where not even its event loop runs) is killed if it runs on this host, so that
the runtime brings a fresh one; on other hosts their own runtime must notice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import time
import uuid
from collections.abc import Sequence
from typing import Any

from forge_ptq import runtime
from forge_ptq.services.coordinator import Coordinator, Member, Report, Terms
from forge_ptq.services.round import Item

log = logging.getLogger(__name__)

POLL_S = 2.0
CALL_TIMEOUT_S = 30.0
"""For one call to the coordinator, which does nothing but answer."""

GRACE_S = 5.0
"""Past a round's deadline, for the coordinator to say that it is over."""

ABSENT_ROUNDS = 3
ABSENT_HEARTBEATS = 10
"""A replica that was in an earlier round counts as silent when it has missed this many rounds in
a row and for this many heartbeats. A busy one is back sooner."""


class FleetError(RuntimeError):
    """Work that the replicas did not get done; the message says what is missing and why."""


class Crew:
    """See the module's docstring. quantizers: handles of services, or of single actors."""

    def __init__(self, quantizers: Sequence[Any], coordinator: Any, heartbeat_s: float) -> None:
        self.quantizers = list(quantizers)
        self.coordinator = coordinator
        self.heartbeat_s = heartbeat_s
        self._active: dict[str, tuple[Any, ...]] = {}
        """Open rounds -> arguments of ``work``."""
        self._background: set[asyncio.Task[Any]] = set()
        self._known: dict[str, tuple[Member, float, int]] = {}
        """Replica -> who it is, when it was last in a round, rounds missed since."""
        for quantizer in self.quantizers:
            if hasattr(quantizer, "session"):  # a service; a single actor is not respawned
                quantizer.on_respawn(self._rejoin)

    async def size(self) -> int:
        """Replicas in all, dead or alive."""
        total = 0
        for quantizer in self.quantizers:
            if hasattr(quantizer, "session"):
                summary = await quantizer.get_metrics_summary()
                total += int(summary["service"]["total_replicas"])
            else:
                total += 1
        return total

    async def hold(self, kind: str, items: Sequence[Item], deadline_s: float) -> Report:
        """One round from start to end. Whatever became of its items is in the report.

        Work and results pass through the coordinator as bytes: it need not know them, nor import
        what they are made of.
        FleetError if no replica could be asked at all, or if the coordinator dies meanwhile. Takes
        up to GRACE_S longer than deadline_s: whoever puts another limit around it must leave time
        for that, or the reasons are lost. Silent replicas are replaced even then.
        """
        round_id = f"{kind}-{uuid.uuid4().hex[:8]}"
        terms = Terms(self.heartbeat_s, deadline_s)
        sealed = [Item(item.id, pickle.dumps(item.work)) for item in items]
        await self._open(round_id, sealed, terms)
        arguments = (self.coordinator, round_id, self.heartbeat_s, deadline_s)
        self._active[round_id] = arguments
        calls = [self._start(self._ask(q, arguments), round_id) for q in self.quantizers]
        try:
            await self._over(round_id, calls, time.monotonic() + deadline_s + GRACE_S)
        finally:
            del self._active[round_id]
            report: Report = await self._call("close", round_id)
            await self._replace(report)
        finished = report.outcome.finished
        report.outcome.finished = {item: pickle.loads(done) for item, done in finished.items()}
        return report

    async def close(self) -> None:
        """Stop waiting for replicas that have not returned."""
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _open(self, round_id: str, items: list[Item], terms: Terms) -> None:
        """Open a round; at a new coordinator if the old one has died or does not answer.

        It kept nothing of value. A silent one is not killed: it may share its process.
        """
        try:
            await self._call("open_round", round_id, items, terms)
        except FleetError as error:
            if not isinstance(error.__cause__, runtime.ActorDied | TimeoutError):
                raise
            log.warning("%s; starting another one", error)
            self.coordinator = await Coordinator.options(mesh_name="coordinator").as_actor()
            await self._call("open_round", round_id, items, terms)

    async def _over(self, round_id: str, calls: list[asyncio.Task[Any]], limit: float) -> None:
        """Return when the coordinator says that the round is over."""
        waiting: set[asyncio.Task[Any]] = set(calls)
        over = asyncio.create_task(self._call("wait", round_id, POLL_S))
        try:
            while True:
                await asyncio.wait({over, *waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting -= {call for call in waiting if call.done()}
                failures = [call.exception() for call in calls if call.done()]
                if len(failures) == len(calls) and all(failures):
                    raise FleetError(f"no replica can be asked: {failures[0]}") from failures[0]
                if not over.done():
                    continue
                if over.result() is not None:
                    return
                if time.monotonic() > limit:
                    raise FleetError(f"the coordinator did not end round {round_id} in time")
                over = asyncio.create_task(self._call("wait", round_id, POLL_S))
        finally:
            over.cancel()

    async def _call(self, endpoint: str, *args: Any) -> Any:
        """One call to the coordinator, with a deadline."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await getattr(self.coordinator, endpoint).call_one(*args)
        except TimeoutError as error:
            raise FleetError(f"the coordinator does not answer to {endpoint}") from error
        except runtime.ActorDied as error:
            raise FleetError(f"the coordinator died: {error}") from error

    @staticmethod
    async def _ask(quantizer: Any, arguments: tuple[Any, ...]) -> None:
        """``work`` on every replica of a service, or on one actor."""
        fanout = getattr(quantizer.work, "fanout", None)
        await (fanout or quantizer.work.call)(*arguments)

    def _start(self, call: Any, round_id: str) -> asyncio.Task[Any]:
        """Run a call in the background; what it raises is logged."""
        task = asyncio.create_task(call)
        self._background.add(task)

        def ended(task: asyncio.Task[Any]) -> None:
            self._background.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.warning("a replica's part in round %s failed: %s", round_id, error)

        task.add_done_callback(ended)
        return task

    def _rejoin(self, replica: int, actor: Any) -> None:
        """A respawned replica joins the rounds that are open."""
        for arguments in self._active.values():
            log.info("replica %d is back and joins round %s", replica, arguments[1])
            self._start(actor.work.call(*arguments), arguments[1])

    async def _replace(self, report: Report) -> None:
        """Kill the silent replicas of this host; the runtime respawns them."""
        now, current = time.monotonic(), await self._pids()
        silent = set(report.outcome.silent)
        for replica, member in report.members.items():
            self._known[replica] = (member, now, 0)
        for replica, (member, seen, missed) in list(self._known.items()):
            if not current & set(member.pids):
                del self._known[replica]  # died, and was noticed
                continue
            if replica not in report.members:
                missed += 1
                self._known[replica] = (member, seen, missed)
                if missed >= ABSENT_ROUNDS and now - seen > ABSENT_HEARTBEATS * self.heartbeat_s:
                    silent.add(replica)
            if replica in silent:
                self._kill(member, current)
                del self._known[replica]
        suspects = [
            report.members[replica]
            for replica in report.outcome.lost
            if replica not in silent and report.ages[replica] > self.heartbeat_s
        ]
        if suspects:
            self._start(self._suspect(suspects), "of the past")

    async def _suspect(self, members: Sequence[Member]) -> None:
        """Kill those that had an item when they fell silent, and stay so after the round.

        Alive they would beat, and be told to drop the item.
        """
        pause_s = 2 * self.heartbeat_s
        await asyncio.sleep(pause_s)
        ages = await self._call("ages", [member.id for member in members])
        current = await self._pids()
        for member in members:
            if ages[member.id] >= pause_s and current & set(member.pids):
                self._kill(member, current)

    async def _pids(self) -> set[int]:
        """All processes of all quantizers."""
        return {pid for quantizer in self.quantizers for pid in await runtime.pids(quantizer)}

    @staticmethod
    def _kill(member: Member, current: set[int]) -> None:
        if member.host != socket.gethostname():
            log.error("replica %s is silent; it runs on another host and is left", member.id)
            return
        log.error("replica %s is silent: killing its processes %s", member.id, member.pids)
        for pid in set(member.pids) & current:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                log.info("process %d had just ended", pid)
