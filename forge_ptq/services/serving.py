"""What serves, what served before it, and how generators are made to serve something else.

The pointer in the store always moves *before* the flip. What it then names has passed the gate, or
has served before, so it makes no difference which of the two a generator serves that dies in
between: the one that comes back reads the pointer, and its siblings have flipped. The other order
would let a generator come back with the old version after the run was told that the new one
serves. If no replica flips in a commit, the pointer moves back.

A rollback is the same: what it goes back to is in the idle slot of every replica before the pointer
moves (there still, or staged again from the store), and a replica that has it there flips back to
the very tensors that served before.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forge_ptq import store
from forge_ptq.artifact import ArtifactRef
from forge_ptq.services.crew import GRACE_S
from forge_ptq.services.passage import Passage, State, Transition
from forge_ptq.services.replicas import (
    PublishError,
    call_all,
    live_artifact,
    staged_slot,
    survivors,
    within,
)

log = logging.getLogger(__name__)

HISTORY = 64
RETAINED = 4
"""Artifacts on probation that stay in the store, in case they are confirmed and gone back to."""
FULL_PRECISION = "bf16"
"""Plan of artifacts without a quantized layer."""


def plan_of(layers: Mapping[str, str]) -> str:
    """Names the schemes of all layers: equal for artifacts of one plan."""
    if set(layers.values()) <= {"bf16"}:
        return FULL_PRECISION
    text = json.dumps(sorted(layers.items()))
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


@dataclass
class Served:
    """An artifact that serves or has served."""

    ref: ArtifactRef
    plan: str
    passage: Passage

    @property
    def quantized(self) -> bool:
        """Whether any layer is."""
        return self.plan != FULL_PRECISION

    @property
    def confirmed(self) -> bool:
        """Its probation went well, or it needs none."""
        return self.passage.state is State.CONFIRMED


class Serving:
    """See the module's docstring. cfg: config.PTQConfig. note: is told of every transition."""

    def __init__(self, cfg: Any, policy: Any, note: Callable[[Transition], None]) -> None:
        self.cfg = cfg
        self.policy = policy
        self.note = note
        self.history: list[Served] = []
        """In the order in which they last began to serve; the last one serves."""
        self.companion: ArtifactRef | None = None
        """bf16 artifact of the serving version that may serve beside it."""
        self._companions: dict[str, str] = {}
        """Artifact id -> plan that it accompanies."""
        self.oldest_usable: int | None = None
        """Oldest version whose rollouts can still be trained on, if that is known."""
        self.last_plan = FULL_PRECISION
        """Of the last quantized artifact that was committed."""

    @property
    def current(self) -> Served | None:
        """What serves."""
        return self.history[-1] if self.history else None

    def find(self, artifact_id: str) -> Served | None:
        """An artifact that serves or has served."""
        return next((s for s in self.history if s.ref.artifact_id == artifact_id), None)

    def plan_behind(self, artifact_id: str) -> str | None:
        """Plan of an artifact that serves or has served, of a companion the one it accompanies."""
        served = self.find(artifact_id)
        return served.plan if served is not None else self._companions.get(artifact_id)

    def enter(self, served: Served) -> None:
        """It serves now."""
        self.companion = None
        self.history = [s for s in self.history if s.ref != served.ref]
        self.history.append(served)
        if served.quantized:
            self.last_plan = served.plan
        safe = next(self.targets(), None)
        extra = max(0, len(self.history) - HISTORY)
        self.history = [s for s in self.history[:extra] if s is safe] + self.history[extra:]

    def targets(self) -> Iterator[Served]:
        """What could be gone back to, newest first: confirmed, and not what serves."""
        return (s for s in reversed(self.history[:-1]) if s.confirmed)

    def kept(self) -> set[str]:
        """Artifacts that must stay in the store: what serves, what served before it, its companion,
        what would be gone back to, and what may yet be confirmed for that."""
        gone = (State.CONDEMNED, State.ROLLED_BACK)
        served = [s for s in self.history[-2:-1] if s.passage.state not in gone]
        served += [*self.history[-1:], *list(self.targets())[:1]]
        if self.oldest_usable is not None:
            usable = [s for s in self.history if s.ref.policy_version >= self.oldest_usable]
            served += [s for s in usable if s.passage.state is State.PROBATION][-RETAINED:]
        refs = [s.ref for s in served] + ([self.companion] if self.companion else [])
        return {ref.artifact_id for ref in refs}

    # ---- commit

    async def commit(self, ref: ArtifactRef, numbers: dict[str, Any]) -> None:
        """Move the pointer, flip every replica, and make sure that all serve the artifact.

        numbers: takes the times of the flip. Raises PublishError if none does. The pointer is then
        moved back, unless the store does not answer: it may name either artifact until the next
        commit.
        """
        previous = self.current.ref if self.current else None
        try:
            await store.set_committed(ref)
        except store.StoreError as error:  # it may have landed all the same
            await self._restore(previous)
            raise PublishError(f"the pointer could not be moved: {error}") from error
        try:
            limit = self.cfg.deadlines.commit_s
            results = await call_all(self.policy, "commit", ref.artifact_id, deadline_s=limit)
        except Exception as error:
            if not await self._settle(ref, previous):
                raise PublishError(f"no generator replica would flip: {error}") from error
            return
        reports = [report for report in results if report is not None]
        for report in reports:
            numbers |= {
                "flip_s": max(report.flip_s, numbers.get("flip_s", 0.0)),
                "pause_s": max(report.pause_s, numbers.get("pause_s", 0.0)),
                "step_s_median": report.step_s_median,
            }
        if len(reports) < len(results):
            log.warning("a generator replica died in commit; it comes back with the new artifact")
            if not await self._settle(ref, previous) and not reports:
                raise PublishError("every generator replica died, and none came back with it")

    async def _settle(self, ref: ArtifactRef, previous: ArtifactRef | None) -> bool:
        """After a commit that went wrong: whether ref serves now. Never raises.

        If no replica serves it, the pointer is moved back. Replicas that came back meanwhile may
        still serve the previous artifact while others have flipped: they are told to conform.
        """
        limit = self.cfg.deadlines.stage_s
        try:
            serving = await self._live(limit)
        except Exception as error:
            # Nobody answers: whatever comes back reads the pointer, so the pointer is the truth.
            log.warning("no generator answers after the commit of %s: %s", ref.artifact_id, error)
            log.debug("commit of %s", ref.artifact_id, exc_info=True)
            return True
        if serving and ref.artifact_id not in serving:
            await self._restore(previous)
            return False
        if any(artifact_id != ref.artifact_id for artifact_id in serving):
            await self._conform(ref)
        return True

    # ---- rollback

    async def go_back(self, ref: ArtifactRef) -> int:
        """Make every replica serve an artifact of the store; returns how many are behind.

        PublishError, StoreError or what a replica raised if it did not come to that: then nothing
        has moved. Once the pointer has moved it is the truth, and a replica that does not follow
        within the deadline ends itself and comes back with it.
        """
        limit = self.cfg.deadlines.stage_s
        descriptions = survivors(
            await call_all(self.policy, "describe", deadline_s=limit), "describe"
        )
        idle = [staged_slot(description) for description in descriptions]
        if not all(slot.complete and slot.artifact_id == ref.artifact_id for slot in idle):
            survivors(await call_all(self.policy, "stage", ref, deadline_s=limit), "stage")
        previous = self.current.ref if self.current else None
        try:
            await store.set_committed(ref)
        except store.StoreError as error:  # it may have landed all the same
            await self._restore(previous)
            raise PublishError(f"the pointer could not be moved: {error}") from error
        await self._conform(ref)
        try:
            serving = await self._live(limit)
        except Exception as error:
            log.warning("no generator answers after the rollback: %s", error)
            log.debug("rollback to %s", ref.artifact_id, exc_info=True)
            return len(descriptions)
        return sum(artifact_id != ref.artifact_id for artifact_id in serving)

    async def _conform(self, ref: ArtifactRef) -> None:
        """Replicas that do not serve what is committed are made to, or end. Never raises."""
        limit = self.cfg.deadlines.stage_s + self.cfg.deadlines.commit_s
        try:
            await call_all(self.policy, "conform", deadline_s=limit)
        except Exception as error:
            log.warning("some replicas stay behind %s: %s", ref.artifact_id, error)
            log.debug("conforming to %s", ref.artifact_id, exc_info=True)

    async def _restore(self, previous: ArtifactRef | None) -> None:
        """Move the pointer back as far as the store lets us."""
        try:
            await store.set_committed(previous)
        except store.StoreError as error:
            log.warning("the pointer could not be moved back: %s", error)

    async def _live(self, limit: float) -> list[str | None]:
        """What the replicas serve; of those that died meanwhile None."""
        descriptions = await call_all(self.policy, "describe", deadline_s=limit)
        return [live_artifact(description) for description in descriptions if description]

    # ---- companion

    async def accompany(self, fleet: Any) -> ArtifactRef | None:
        """Let the serving version serve in bf16 as well, where the configuration asks for it.

        Never raises: without it the run goes on with the live slot alone.
        """
        current = self.current
        if current is None or not current.quantized:
            return None
        if not (self.cfg.ab.enabled or self.cfg.precision_by_load.enabled):
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
            await call_all(self.policy, "accompany", self.companion, deadline_s=limits.stage_s)
        except Exception as error:
            version = current.ref.policy_version
            log.warning("version %d serves without its full precision: %s", version, error)
            log.debug("version %d", version, exc_info=True)
            return None
        return self.companion

    # ---- memory

    def state(self) -> list[list[Any]]:
        """History as JSON."""
        return [
            [s.ref.artifact_id, s.ref.policy_version, s.plan, str(s.passage.state)]
            for s in self.history
        ]

    def restore(self, records: list[list[Any]], committed: ArtifactRef | None) -> None:
        """Inverse of ``state``, except that only what is committed can serve: unless it is among
        the records, ``enter`` it next. ValueError for anything that is no such state."""
        try:
            found = [
                Served(ArtifactRef(str(i), int(v)), str(plan), Passage(int(v), State(state)))
                for i, v, plan, state in records
            ]
        except (TypeError, ValueError) as error:
            raise ValueError(f"serving: not a stored state: {error}") from error
        quantized = [s.plan for s in found if s.quantized]
        self.last_plan = quantized[-1] if quantized else FULL_PRECISION
        if committed is not None:
            found.sort(key=lambda served: served.ref == committed)  # last, if it is among them
            self.history = found
