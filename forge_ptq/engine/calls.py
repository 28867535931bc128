"""How a generator's endpoints reach its engine thread, and the slot operations they share.

Every wait has a deadline. An engine that has died answers nobody: its process is about to end, and
whoever waits is served by the one that comes after it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from forge_ptq.engine.committed import serve_committed
from forge_ptq.engine.leaving import die, until_gone
from forge_ptq.engine.memory import let_go, out_of_memory
from forge_ptq.engine.types import (
    CommitReport,
    EngineDeadError,
    SlotMemoryError,
    SlotStateError,
    StageReport,
)
from forge_ptq.runtime import Reduce, record_metric

if TYPE_CHECKING:
    from forge_ptq.artifact import ArtifactRef, QuantizedArtifact
    from forge_ptq.engine.core import SlotEngine
    from forge_ptq.engine.thread import EngineThread

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 120.0
JOB_TIMEOUT_S = 3600.0
CONFORMED_WITHIN_S = 300.0
"""How long whatever fills the idle slot waits for a ``conform`` under way."""


class EngineCalls:
    """A part of QuantizedGenerator without endpoints; its attributes are set there."""

    _thread: EngineThread
    _core: SlotEngine
    _slot_jobs: set[Future[Any]]
    _discards: int
    _drain_deadline_s: float
    _update_lock: asyncio.Lock
    _conformed: asyncio.Event

    async def _conform(self, deadline_s: float | None) -> dict[str, Any]:
        try:
            async with asyncio.timeout(deadline_s), self._update_lock:
                self._conformed.clear()
                try:
                    return await serve_committed(self)
                finally:
                    self._conformed.set()
        except Exception as error:
            die(error, "this replica cannot serve what is committed, so its process ends")
            raise

    async def _after_conforming(self) -> None:
        """Whatever would end what a ``conform`` stages waits for it; SlotStateError if too long."""
        try:
            async with asyncio.timeout(CONFORMED_WITHIN_S):
                await self._conformed.wait()
        except TimeoutError as error:
            raise SlotStateError(
                f"what is committed is still being loaded after {CONFORMED_WITHIN_S:g} s"
            ) from error

    async def _stage(self, ref: ArtifactRef, companion: bool = False) -> StageReport:
        from forge_ptq import store

        started, discards = time.perf_counter(), self._discards
        try:
            artifact = await store.get_artifact(ref)
            return await self._stage_artifact(artifact, started, discards, companion)
        except Exception as error:
            if not out_of_memory(error) or isinstance(error, SlotMemoryError):
                raise
            let_go(error)
            nbytes = (await store.get_manifest(ref)).nbytes
            raise SlotMemoryError(
                f"{ref.artifact_id}: not enough memory to load its {nbytes} bytes: {error}"
            ) from error

    async def _stage_artifact(
        self, artifact: QuantizedArtifact, started: float, discards: int, companion: bool = False
    ) -> StageReport:
        from forge_ptq.engine.staging import Candidate

        plan = await asyncio.to_thread(self._core.bank.layout.plan, artifact)
        manifest = artifact.manifest
        load_s = time.perf_counter() - started
        candidate = Candidate(
            manifest.artifact_id, manifest.policy_version, plan, load_s=load_s, started=started
        )
        if discards != self._discards:
            raise SlotStateError(f"{manifest.artifact_id} was discarded before it was staged")
        begin = self._core.accompany if companion else self._core.stage
        report = await self._slot_job(lambda: begin(candidate, self._drain_deadline_s))
        record_metric("generator_perf/stage/stage_s", report.stage_s, Reduce.MAX)
        return report

    async def _commit(self, artifact_id: str) -> CommitReport:
        report = await self._call(lambda: self._core.commit(artifact_id))
        record_metric("generator_perf/commit/pause_s", report.pause_s, Reduce.MAX)
        return report

    async def _drop(self) -> bool:
        self._discards += 1

        def drop() -> bool:
            cancelled = [self._thread.cancel_job(job) for job in list(self._slot_jobs)]
            return self._core.discard() or any(cancelled)

        return await self._call(drop)

    async def take_up(self, artifact_id: str | None) -> bool:
        """For serve_committed."""
        return await self._call(lambda: self._core.take_up(artifact_id))

    async def load(self, ref: ArtifactRef) -> None:
        """For serve_committed."""
        await self._drop()
        await self._stage(ref)
        await self._commit(ref.artifact_id)

    async def _slot_job(self, make: Any) -> Any:
        """Run a job on the idle slot, which ``discard`` may cut short."""
        job = self._thread.run_job(make)
        self._slot_jobs.add(job)
        job.add_done_callback(self._slot_jobs.discard)
        return await self._result(job, JOB_TIMEOUT_S)

    def _abort(self, request_ids: list[str]) -> None:
        """Take sequences whose caller has left out of the engine. Nobody waits for that, so what it
        raises is logged."""
        aborted = self._thread.call(lambda: self._core.abort(request_ids))
        aborted.add_done_callback(_log_failure)

    async def _call(self, function: Any) -> Any:
        return await self._result(self._thread.call(function), CALL_TIMEOUT_S)

    async def _result(self, future: Future[Any], limit_s: float) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.wrap_future(future)
        except EngineDeadError:
            if self._thread.failed:
                await until_gone()
            raise


def _log_failure(done: Future[Any]) -> None:
    error = done.exception()
    if error is not None and not isinstance(error, EngineDeadError):  # the process tells of that
        log.error("sequences stay in the engine: %s", error, exc_info=error)
