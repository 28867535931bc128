"""Quantizer: a replica that holds a full-precision copy of the policy and works in rounds.

    service = await Quantizer.options(num_replicas=4, procs=1).as_service(model_path=..., plan=...)
    await service.work.fanout(coordinator, round_id, heartbeat_s, patience_s)

``work`` pulls items from the Coordinator until the round is over (see work.py for the kinds) and
loads the weights they ask for. A second call for the same round returns at once, so that whoever
runs the round may call again when a replica has come back. With procs > 1 a replica is a
tensor-parallel group: rank 0 pulls and tells the others, and all of them carry the item out.

While an item is in work, beats carry its progress. A replica that has been told to drop its item
and does not within patience_s ends its own process: something in it hangs, and the runtime brings
a fresh one. So does a rank of a group of which an item raised, since the others may be waiting for
it in a collective that will never come.

Endpoints are concurrent because Monarch handles no other message while a plain one runs; calls
are carried out one at a time, in order, and tensor work runs in a worker thread, so ``status``
always answers. The worker's threads: environment variable OMP_NUM_THREADS, else all cores that
this process may use but one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from forge_ptq import store
from forge_ptq.numerics import observer_native
from forge_ptq.numerics.plan import QuantPlan
from forge_ptq.numerics.stats_table import Layout
from forge_ptq.runtime import ForgeActor, concurrent_endpoint, endpoint
from forge_ptq.services.coordinator import Member
from forge_ptq.services.policy_copy import PolicyCopy, build_model
from forge_ptq.services.policy_tp import shard
from forge_ptq.services.ranks import Ranks
from forge_ptq.services.round import WAIT, Assignment
from forge_ptq.services.workbench import AgreedError, DroppedError, Progress, Workbench

log = logging.getLogger(__name__)

T = TypeVar("T")

CALL_TIMEOUT_S = 30.0
"""For one call to the coordinator, which does nothing but answer."""

ROUNDS_REMEMBERED = 64
REPORT_S = 2.0
"""How long the other ranks of a failed group outlive the failure."""

HUNG = 70
"""Exit status of a process that gives itself up."""


@dataclass(frozen=True)
class QuantizerStatus:
    """What a Quantizer holds right now."""

    replica: str
    """Its id in rounds."""
    version: int | None
    """Policy version loaded."""
    layers: dict[str, str]
    """The configured plan, resolved: HF module name -> scheme."""
    layout: Layout
    """Inputs that a calibration measures, with their widths."""


def worker_threads() -> int:
    """Threads for tensor work, see the module's docstring."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    return max(1, len(os.sched_getaffinity(0)) - 1)


class Quantizer(ForgeActor):
    """Holds a full-precision copy of the policy and quantizes it.

    Args: model_path, a HF checkpoint directory (only its config is read); plan,
    {"default": scheme, "overrides": {glob: scheme}}; dtype of the copy and so of the reference
    (see ``build_model``).
    """

    def __init__(
        self, model_path: str, plan: Mapping[str, Any] | None = None, dtype: str = "auto"
    ) -> None:
        super().__init__()
        self.model_path = model_path
        self.dtype = dtype
        self.plan = QuantPlan.from_config(**(plan or {"default": "int8_dynamic"}))
        self._bench: Workbench | None = None
        self._member = Member("", "", ())
        self._rounds: deque[str] = deque(maxlen=ROUNDS_REMEMBERED)
        self._turn = asyncio.Lock()
        self._worker = ThreadPoolExecutor(
            1, "quantizer", initializer=torch.set_num_threads, initargs=(worker_threads(),)
        )

    @endpoint
    async def setup(self) -> None:
        """Build the module tree; raises for a checkpoint or a plan that does not work."""

        ranks = Ranks(self._rank, self._size)

        def build() -> tuple[PolicyCopy, list[tuple[str, int]]]:
            store.prepare()  # later it would stop the heart for seconds
            ranks.connect()
            model = build_model(self.model_path, self.dtype)
            shard(model, ranks.size)
            policy = PolicyCopy(model, self.plan)
            if next(model.parameters()).device.type == "cpu":
                observer_native.kernel()  # compiled now, not while a calibration is waited for
            return policy, ranks.gather((socket.gethostname(), os.getpid()))

        policy, processes = await self._run(build)
        host, pid = processes[0]
        self._member = Member(f"{host}:{pid}", host, tuple(pid for _, pid in processes))
        self._bench = Workbench(policy, ranks, self._member.id, self._run)

    @concurrent_endpoint
    async def status(self) -> QuantizerStatus:
        """Version and plan; answers while ``work`` goes on."""
        bench = self._workbench()
        policy = bench.policy
        return QuantizerStatus(bench.name, policy.version, dict(policy.layers), bench.layout)

    @concurrent_endpoint
    async def work(
        self, coordinator: Any, round_id: str, heartbeat_s: float, patience_s: float
    ) -> int:
        """Take part in a round until it is over; returns the items that this replica did.

        0 at once if it takes part, or did, already. What goes wrong with an item is told to the
        coordinator; this raises only if the coordinator cannot be reached.
        """
        if round_id in self._rounds:
            return 0
        self._rounds.append(round_id)
        async with self._turn:
            bench = self._workbench()
            if bench.ranks.rank > 0:
                return await self._follow(bench)
            try:
                return await self._lead(coordinator, round_id, heartbeat_s, patience_s)
            finally:
                await self._run(lambda: bench.ranks.broadcast(None))

    async def _lead(
        self, coordinator: Any, round_id: str, heartbeat_s: float, patience_s: float
    ) -> int:
        """Rank 0: claim, tell the others, do it, report."""
        done, bench, me = 0, self._workbench(), self._member
        while (claim := await _call(coordinator.claim, round_id, me)) is not None:
            if claim is WAIT:
                continue
            await self._run(lambda claim=claim: bench.ranks.broadcast(claim))  # type: ignore[misc]
            item, progress = claim.item, Progress(bench.ranks)
            beats = asyncio.create_task(
                self._beat(coordinator, round_id, progress, heartbeat_s / 3, patience_s)
            )
            try:
                result = await bench.carry_out(pickle.loads(item.work), claim.attempt, progress)
                sealed = await self._run(lambda result=result: pickle.dumps(result))  # type: ignore[misc]
                done += await _call(coordinator.finish, round_id, me.id, item.id, sealed)
            except DroppedError:
                log.info("%s of round %s: dropped, it is not needed any more", item.id, round_id)
            except Exception as error:
                log.exception("%s of round %s failed", item.id, round_id)
                await _call(coordinator.fail, round_id, me.id, item.id, _describe(error))
                self._distrust(bench, error)
            finally:
                beats.cancel()
        return done

    async def _follow(self, bench: Workbench) -> int:
        """Other ranks: do what rank 0 does."""
        done = 0
        while True:
            claim: Assignment | None = await self._run(bench.ranks.broadcast)
            if claim is None:
                return done
            try:
                work = pickle.loads(claim.item.work)
                await bench.carry_out(work, claim.attempt, Progress(bench.ranks))
                done += 1
            except DroppedError:
                continue
            except Exception as error:
                log.exception("%s failed on rank %d", claim.item.id, bench.ranks.rank)
                if not isinstance(error, AgreedError):
                    await asyncio.sleep(REPORT_S)  # rank 0 may be telling the coordinator
                self._distrust(bench, error)

    @staticmethod
    def _distrust(bench: Workbench, error: Exception) -> None:
        """After a failure: weights are pulled anew, and ranks that may have parted end."""
        bench.policy.version = None
        if bench.ranks.size > 1 and not isinstance(error, AgreedError):
            _give_up("an item raised, and the ranks may not be at the same point any more")

    async def _beat(
        self, coordinator: Any, round_id: str, progress: Progress, every_s: float, patience_s: float
    ) -> None:
        """Tell the coordinator that this replica lives, until cancelled."""
        told = None
        while True:
            await asyncio.sleep(every_s)
            try:
                go_on = await _call(coordinator.beat, round_id, self._member.id, progress.done)
            except (TimeoutError, RuntimeError) as error:
                log.warning("round %s: no beat: %s", round_id, error)
                continue
            if go_on:
                continue
            progress.dropped.set()
            told = told or time.monotonic()
            if time.monotonic() - told > patience_s:
                _give_up(f"its item was to be dropped {patience_s:g} s ago: something hangs")

    def _workbench(self) -> Workbench:
        if self._bench is None:
            raise RuntimeError("the Quantizer is not set up yet")
        return self._bench

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)


async def _call(bound: Any, *args: Any) -> Any:
    """One call to the coordinator, with a deadline."""
    async with asyncio.timeout(CALL_TIMEOUT_S):
        return await bound.call_one(*args)


def _describe(error: Exception) -> str:
    """The same words for the same error on every replica."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _give_up(why: str) -> None:
    """End this process; the runtime brings a fresh one."""
    log.critical("this process ends itself: %s", why)
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(HUNG)
