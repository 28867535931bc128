"""What serves, what served before it, and how generators are made to serve something else.

The pointer in the store always moves *before* the flip. What it then names has passed the gate, or
has served before, so it makes no difference which of the two a generator serves that dies in
between: the one that comes back reads the pointer, and its siblings have flipped. The other order
would let a generator come back with the old version after the run was told that the new one
serves. If no replica flips in a commit, the pointer moves back. One that comes back meanwhile may
have read the pointer before it moved: after every commit, and before the next publish, all are
asked what they serve, and made to conform if that is something else.

A rollback is the same: what it goes back to is in the idle slot of every replica before the pointer
moves (there still, or staged again from the store), and a replica that has it there flips back to
the very tensors that served before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from forge_ptq import store
from forge_ptq.artifact import ArtifactRef
from forge_ptq.services.crew import GRACE_S
from forge_ptq.services.history import FULL_PRECISION, HISTORY, History, Served, plan_of
from forge_ptq.services.passage import Transition
from forge_ptq.services.replicas import (
    PublishError,
    call_all,
    live_artifact,
    staged_slot,
    survivors,
    within,
)

__all__ = ["FULL_PRECISION", "Served", "Serving", "plan_of"]

log = logging.getLogger(__name__)


class Serving(History):
    """See the module's docstring. cfg: config.PTQConfig. note: is told of every transition."""

    def __init__(self, cfg: Any, policy: Any, note: Callable[[Transition], None]) -> None:
        super().__init__()
        self.cfg = cfg
        self.policy = policy
        self.note = note
        self._replicas = 0
        """Most that have answered at once."""
        self._deadly: ArtifactRef | None = None
        """Companion that a replica could not take."""

    # ---- commit

    async def commit(self, ref: ArtifactRef, numbers: dict[str, Any]) -> None:
        """Move the pointer, flip every replica, and make sure that all serve the artifact.

        numbers: takes the times of the flip. Raises PublishError if none does. The pointer is then
        moved back, unless the store does not answer: it may name either artifact until the next
        ``check``.
        """
        previous = await self._move_pointer(ref)
        try:
            limit = self.cfg.deadlines.commit_s
            results = await call_all(self.policy, "commit", ref.artifact_id, deadline_s=limit)
        except Exception as error:
            if not await self._settle(ref, previous):
                raise PublishError(f"no generator replica would flip: {error}") from error
            return
        reports = [report for report in results if report is not None]
        self._replicas = max(self._replicas, len(results))
        for report in reports:
            numbers |= {
                "flip_s": max(report.flip_s, numbers.get("flip_s", 0.0)),
                "pause_s": max(report.pause_s, numbers.get("pause_s", 0.0)),
                "step_s_median": report.step_s_median,
            }
        if len(reports) < len(results):
            log.warning("a generator replica died in commit; it comes back with the new artifact")
        if not await self._settle(ref, previous):
            raise PublishError("every generator replica died, and none came back with it")

    async def _settle(self, ref: ArtifactRef, previous: ArtifactRef | None) -> bool:
        """After a commit: whether ref serves now. Never raises.

        If no replica serves it, the pointer is moved back. Replicas that came back meanwhile may
        still serve the previous artifact while others have flipped: they are told to conform, and
        so are all while one is missing that may be on its way back.
        """
        limit = self.cfg.deadlines.stage_s
        try:
            serving = await self._live(limit)
        except Exception as error:
            # Nobody answers: whatever comes back reads the pointer, so the pointer is the truth.
            log.warning("no generator answers after the commit of %s: %s", ref.artifact_id, error)
            log.debug("commit of %s", ref.artifact_id, exc_info=True)
            await self._conform(ref)
            return True
        missing = len(serving) < self._replicas
        if serving and ref.artifact_id not in serving:
            restored = await self._restore(previous)
            # It may have come back with what the pointer named for a moment. While the pointer
            # still does, the others must not be told to follow it.
            if missing and restored:
                await self._conform(previous)
            return False
        if missing or any(artifact_id != ref.artifact_id for artifact_id in serving):
            await self._conform(ref)
        return True

    async def check(self) -> None:
        """Before a publish: replicas that have come back since the commit serve what the others do.

        The pointer says what that is; where it names something else it is set first. Never raises.
        """
        if self.current is None:
            return
        ref = self.current.ref
        try:
            serving = await self._live(self.cfg.deadlines.commit_s)
            if (committed := await store.get_committed()) != ref:
                log.warning("the pointer named %s, not %s", committed, ref.artifact_id)
                await store.set_committed(ref)
            if all(artifact_id == ref.artifact_id for artifact_id in serving):
                return
            log.warning("of %d generator replicas not all serve %s", len(serving), ref.artifact_id)
        except Exception as error:
            log.warning("what the generator replicas serve was not checked: %s", error)
            log.debug("check of %s", ref.artifact_id, exc_info=True)
            return
        await self._conform(ref)

    # ---- rollback

    async def bring(self, ref: ArtifactRef) -> None:
        """Have every replica hold an artifact of the store in its idle slot, where it is not still.

        PublishError, StoreError or what a replica raised if one does not.
        """
        limit = self.cfg.deadlines.stage_s
        descriptions = survivors(
            await call_all(self.policy, "describe", deadline_s=limit), "describe"
        )
        self._replicas = max(self._replicas, len(descriptions))
        idle = [staged_slot(description) for description in descriptions]
        if not all(slot.complete and slot.artifact_id == ref.artifact_id for slot in idle):
            survivors(await call_all(self.policy, "stage", ref, deadline_s=limit), "stage")

    async def go_back(self, ref: ArtifactRef) -> int:
        """Make every replica serve what ``bring`` has brought; returns how many are behind.

        PublishError if the pointer cannot be moved: then nothing has. Once it has it is the truth,
        and a replica that does not follow within the deadline ends itself and comes back with it.
        """
        await self._move_pointer(ref)
        await self._conform(ref)
        try:
            serving = await self._live(self.cfg.deadlines.stage_s)
        except Exception as error:
            log.warning("no generator answers after the rollback: %s", error)
            log.debug("rollback to %s", ref.artifact_id, exc_info=True)
            return self._replicas
        return sum(artifact_id != ref.artifact_id for artifact_id in serving)

    async def rejoin(self, replica: Any) -> None:
        """A replica that has come back, an actor, serves what is committed now, whatever the
        pointer named when it read it. What it raised if it does not: then it ends itself.
        """
        limit = self.cfg.deadlines.stage_s + self.cfg.deadlines.commit_s
        await call_all(replica, "conform", limit, deadline_s=limit + GRACE_S)

    async def _conform(self, committed: ArtifactRef | None) -> None:
        """Replicas that do not serve what is committed are made to, or end. Never raises."""
        name = committed.artifact_id if committed is not None else "the starting checkpoint"
        limit = self.cfg.deadlines.stage_s + self.cfg.deadlines.commit_s
        try:
            # It ends itself at the limit: a little more time shows that it has.
            await call_all(self.policy, "conform", limit, deadline_s=limit + GRACE_S)
        except Exception as error:
            log.warning("some replicas stay behind %s: %s", name, error)
            log.debug("conforming to %s", name, exc_info=True)

    async def _move_pointer(self, ref: ArtifactRef) -> ArtifactRef | None:
        """Returns what it named before; PublishError if it cannot be moved."""
        previous = self.current.ref if self.current else None
        try:
            await store.set_committed(ref)
        except store.StoreError as error:  # it may have landed all the same
            await self._restore(previous)
            raise PublishError(f"the pointer could not be moved: {error}") from error
        return previous

    async def _restore(self, previous: ArtifactRef | None) -> bool:
        """Move the pointer back; whether the store let us."""
        try:
            await store.set_committed(previous)
        except store.StoreError as error:
            log.warning("the pointer could not be moved back: %s", error)
            return False
        return True

    async def _live(self, limit: float) -> list[str | None]:
        """What the replicas serve; of those that died meanwhile None."""
        descriptions = await call_all(self.policy, "describe", deadline_s=limit)
        found = [live_artifact(description) for description in descriptions if description]
        self._replicas = max(self._replicas, len(found))
        return found

    # ---- companion

    async def accompany(self, fleet: Any, replica: Any = None) -> ArtifactRef | None:
        """Let the serving version serve in bf16 as well, where the configuration asks for it.

        replica: the actor that alone lacks it. It gets what the others have. What has failed or
        killed somebody would again, and is given to nobody any more. Never raises: without it the
        run goes on with the live slot alone.
        """
        current = self.current
        if current is None or not current.quantized:
            return None
        if not (self.cfg.ab.enabled or self.cfg.precision_by_load.enabled):
            return None
        if self.companion is not None and self.companion == self._deadly:
            return None
        if replica is not None and self.companion is None:
            return None
        limits = self.cfg.deadlines
        try:
            if self.companion is None:
                work = fleet.quantize(current.ref.policy_version, FULL_PRECISION)
                limit = limits.quantize_s + 2 * GRACE_S
                self.companion = await within(work, "quantize", limit)
                self._companions[self.companion.artifact_id] = current.plan
                for old in list(self._companions)[:-HISTORY]:
                    del self._companions[old]
            to, limit = replica or self.policy, limits.stage_s
            if None in await call_all(to, "accompany", self.companion, deadline_s=limit):
                self._deadly = self.companion
        except Exception as error:
            self._deadly = self.companion
            version = current.ref.policy_version
            log.warning("version %d serves without its full precision: %s", version, error)
            log.debug("version %d", version, exc_info=True)
            return None
        return self.companion
