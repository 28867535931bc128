"""PTQ: what an app adds to run its rollouts quantized.

    ptq = await PTQ.launch(cfg.ptq, policy=policy, quantizer=quantizer)
    ...
    await ptq.offer(episodes)              # finished rollouts, for calibration and probe
    verdict = await ptq.publish(version)   # instead of policy.update_weights.fanout(version)
    rollback = await ptq.watch(step, records, oldest_usable)    # after every training step
    ...
    await ptq.close()

publish(version) in order, each phase with its own deadline (cfg.deadlines):

    rollouts    enough to judge the candidate and to calibrate if due? else kept, before any work
    calibrate   if due (schedule.py): all Quantizer replicas measure W_v, statistics are merged,
                smoothing, ranges and plan are chosen and then frozen until the next time
    quantize    each replica its share of W_v's layers, the artifact into the store
    stage       every generator replica fills its idle slot, still serving
    probe       one replica scores the rollouts under the idle slot, the Quantizers under W_v; more
                of them while the guard is undecided
    decide      guard.decide
    commit      store.set_committed(artifact), then every replica flips (serving.py)

Whatever fails before commit empties the idle slots again and the live ones serve on: the verdict
is "kept", with the reason. What follows a refusal is in ladder.py and climb.py, what happens after
the commit in probation.py and watch.py, the companion (ptq.ab, ptq.precision_by_load), which is
made after publish has returned, in companion.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forge_ptq import store
from forge_ptq.artifact import ArtifactRef
from forge_ptq.services import publish_metrics
from forge_ptq.services.candidate import Publisher
from forge_ptq.services.climb import Climb
from forge_ptq.services.companion import Accompanying
from forge_ptq.services.coordinator import Coordinator
from forge_ptq.services.fleet import QuantizerFleet
from forge_ptq.services.injection import Faults
from forge_ptq.services.ladder import Ladder
from forge_ptq.services.merger import StatsMerger
from forge_ptq.services.parts import Parts
from forge_ptq.services.passage import Passage, State, Transition
from forge_ptq.services.sampler import RolloutSampler
from forge_ptq.services.schedule import Schedule
from forge_ptq.services.serving import FULL_PRECISION, Served, Serving, plan_of
from forge_ptq.services.verdict import Rollback, Verdict
from forge_ptq.services.watch import Watch

if TYPE_CHECKING:
    from forge_ptq.mismatch import SequenceMismatch

log = logging.getLogger(__name__)

SCHEMA = 1
CLOSE_TIMEOUT_S = 10.0
KEPT = 1000
"""Verdicts, rollbacks and untold transitions that are kept."""


class PTQ:
    """One publisher for one generator service. Made by ``launch``."""

    def __init__(self, cfg: Any, policy: Any, fleet: Any, inject: Sequence[Any]) -> None:
        self.cfg = cfg
        auto = cfg.plan.rollouts if cfg.plan.mode == "auto" else 0
        self.sampler = RolloutSampler(
            cfg.sampler.capacity,
            cfg.sampler.max_age,
            cfg.sampler.probe_fraction,
            plan_fraction=auto / (auto + cfg.calibration.rollouts),
            max_tokens=cfg.sampler.max_tokens,
        )
        self.verdicts: deque[Verdict] = deque(maxlen=KEPT)
        self.rollbacks: deque[Rollback] = deque(maxlen=KEPT)
        self.fleet = fleet
        self.serving = Serving(cfg, policy, self._note)
        self.ladder = Ladder(cfg.guard.recover_after)
        self.faults = Faults(inject)
        self._publisher = Publisher(cfg, policy, fleet)
        self._parts = Parts(
            cfg,
            fleet,
            self.sampler,
            Schedule(cfg, self.sampler),
            self._publisher,
            self.serving,
            self.ladder,
            self.faults,
        )
        self._watch = Watch(self._parts)
        self._notes: deque[Transition] = deque(maxlen=KEPT)
        """Transitions that no verdict or rollback has told yet."""
        self._lock = asyncio.Lock()
        self._accompanying = Accompanying(self.serving, fleet, self._lock)
        self._closed = False

    @classmethod
    async def launch(
        cls,
        cfg: Any,
        *,
        policy: Any,
        quantizer: Any,
        merger: Any | None = None,
        coordinator: Any | None = None,
        inject: Sequence[Any] = (),
        state: Mapping[str, Any] | None = None,
    ) -> PTQ:
        """cfg: config.PTQConfig. policy, quantizer: handles (service or actor) of the running
        generator and Quantizer. merger, coordinator: handles of the StatsMerger service and the
        Coordinator actor; started here where they are not given. inject: [config.InjectConfig],
        faults on purpose. state: of an earlier session, see ``state()``.
        """
        if merger is None:
            merger = await StatsMerger.options(mesh_name="stats_merger").as_service()
        if coordinator is None:
            coordinator = await Coordinator.options(mesh_name="coordinator").as_actor()
        fleet = await QuantizerFleet.launch(cfg, quantizer, merger, coordinator)
        return await cls.attach(cfg, policy, fleet, inject, state)

    @classmethod
    async def attach(
        cls,
        cfg: Any,
        policy: Any,
        fleet: Any,
        inject: Sequence[Any] = (),
        state: Mapping[str, Any] | None = None,
    ) -> PTQ:
        """A publisher over a fleet that runs; it goes on from what the store says serves, and from
        what an earlier session remembered. ValueError for a state that is none."""
        ptq = cls(cfg, policy, fleet, inject)
        committed = await store.get_committed()
        if state:
            if state.get("schema") != SCHEMA:
                raise ValueError(f"ptq: schema {state.get('schema')!r}, this code reads {SCHEMA}")
            ptq.ladder.restore(state.get("ladder", {}))
            ptq.serving.restore(state.get("serving", []), committed)
            ptq._watch.restore(state.get("watch", {}))
            if "schedule" in state:
                ptq._parts.schedule.restore(state["schedule"])
        current = ptq.serving.current
        if committed is not None and (current is None or current.ref != committed):
            plan = plan_of((await store.get_manifest(committed)).layers)
            begin = State.CONFIRMED if plan == FULL_PRECISION else State.PROBATION
            ptq.serving.enter(Served(committed, plan, Passage(committed.policy_version, begin)))
        ptq._watch.begin()
        if hasattr(policy, "session"):  # a service; a single actor is not respawned
            policy.on_respawn(ptq._respawned)
        return ptq

    async def _respawned(self, _: int, actor: Any) -> None:
        """A generator replica has come back; it takes requests once this has returned."""
        await self.serving.rejoin(actor)
        self._accompanying.begin(actor)

    def state(self) -> dict[str, Any]:
        """What is remembered between publishes, as JSON; ``attach`` takes it."""
        return {
            "schema": SCHEMA,
            "ladder": self.ladder.state(),
            "serving": self.serving.state(),
            "watch": self._watch.state(),
            "schedule": self._parts.schedule.state(),
        }

    @property
    def served_version(self) -> int:
        """Policy version that new requests get; 0 is the starting checkpoint."""
        current = self.serving.current
        return current.ref.policy_version if current is not None else 0

    async def offer(self, episodes: Iterable[Any]) -> None:
        """Take finished episodes (attributes completion, reward, policy_version)."""
        finished = list(episodes)
        self.sampler.offer(finished)
        self._watch.offer(finished)

    async def publish(self, version: int, must_serve: bool = False) -> Verdict:
        """Quantize, judge and serve a policy version that is complete in the store.

        One publish at a time; a second call waits. must_serve: fall back to bf16 rather than keep
        the old version, unprobed if there are no rollouts to probe with. Never raises for what
        can go wrong in a publish: the verdict is "kept" and says why.
        """
        async with self._lock:
            verdict = Verdict(version=version)
            if self._closed:
                verdict.reason = "PTQ is closed"
                return verdict
            started = time.perf_counter()
            try:
                await self._publish(verdict, must_serve)
            finally:
                self._publisher.forget_reference()
                verdict.level = self.ladder.level
                verdict.transitions = self._told()
                verdict.wall_s = time.perf_counter() - started
                self.verdicts.append(verdict)
                if verdict.attempts:  # whatever was staged has taken the companion's place
                    self._accompanying.begin()
            await self._retire(version)
        publish_metrics.record(verdict)
        return verdict

    async def _publish(self, verdict: Verdict, must_serve: bool) -> None:
        climb = Climb(self._parts, verdict)
        await self.serving.check()
        try:
            # What serves may be guilty and could not be taken back: rather this version in bf16.
            await climb.run(must_serve or self._watch.guilty)
        finally:  # a cancellation may have waited for the commit
            if climb.served:
                self._watch.begin()

    async def accompanied(self) -> ArtifactRef | None:
        """Waits until what serves has its companion, or cannot have it; the companion or None."""
        return await self._accompanying.settled()

    async def watch(
        self, training_step: int, records: Sequence[SequenceMismatch], oldest_usable: int
    ) -> Rollback | None:
        """What was trained on says how good what serves is. Call after every training step.

        records: one per trained sequence. oldest_usable: oldest version whose rollouts can still be
        trained on. What fails its probation is taken back: to the last confirmed artifact, else to
        the serving version in bf16. Never raises for what can go wrong in it. Returns at once
        unless something is to be taken back; then a publish under way ends first.
        """
        if self._closed or not self.cfg.enabled:
            return None
        self.serving.oldest_usable = oldest_usable
        self._watch.judge(records)
        if not self._watch.guilty:
            return None
        log.warning("training step %d: what serves is to be taken back", training_step)
        async with self._lock:
            if self._closed or not self._watch.guilty:
                return None
            rollback = await self._watch.take_back(oldest_usable)
            if rollback is not None:
                rollback = replace(rollback, transitions=self._told())
                self.rollbacks.append(rollback)
                await self._retire(max(training_step, rollback.version_from))
        if rollback is not None:
            self._accompanying.begin()
        return rollback

    async def close(self) -> None:
        """No publish starts any more; one that runs gets a few seconds to end."""
        self._closed = True
        await self._accompanying.close(CLOSE_TIMEOUT_S)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S), self._lock:
                pass
        except TimeoutError:
            log.warning("a publish was still running when PTQ closed")
        await self.fleet.close()

    def _note(self, transition: Transition) -> None:
        """Every transition is logged, counted and told in the next verdict or rollback."""
        log.info("%s", transition)
        publish_metrics.record_transition(transition)
        self._notes.append(transition)

    def _told(self) -> tuple[Transition, ...]:
        told = tuple(self._notes)
        self._notes.clear()
        return told

    async def _retire(self, version: int) -> None:
        """Delete weights older than the version before this one, unless they are of what serves or
        would be gone back to, and artifacts that nobody needs (``Serving.kept``).

        What the pointer names stays, whatever went wrong in moving it. Every other artifact goes,
        one that a late Quantizer stored after its publish was over too.
        """
        try:
            committed = await store.get_committed()  # unreadable: nothing is dropped
            stored = await store.artifact_ids()
            self.serving.found(stored)
            kept = self.serving.kept() | ({committed.artifact_id} if committed else set())
            self.serving.found(kept.intersection(stored))
            for artifact_id in stored:
                if artifact_id not in kept:
                    await store.drop_artifact(artifact_id)
            older = [v for v in await store.weight_versions() if v < version]
            needed = {served.ref.policy_version for served in list(self.serving.targets())[:1]}
            for old in set(older[:-1]) - needed - {self.served_version}:
                await store.drop_weights(old)
        except store.StoreError as error:
            log.warning("clean-up after version %d: %s", version, error)
