"""PTQ: what an app adds to run its rollouts quantized.

    ptq = await PTQ.launch(cfg.ptq, policy=policy, quantizer=quantizer)
    ...
    await ptq.offer(episodes)              # finished rollouts, for calibration and probe
    verdict = await ptq.publish(version)   # instead of policy.update_weights.fanout(version)
    ...
    await ptq.close()

publish(version) in order, each phase with its own deadline (cfg.deadlines):

    rollouts    enough to judge the candidate and to calibrate if due? else kept, before any work
    calibrate   if due (schedule.py): all Quantizer replicas measure W_v, statistics are merged,
                smoothing, ranges and plan are chosen and then frozen until the next time
    quantize    each replica its share of W_v's layers, the artifact into the store
    stage       every generator replica fills its idle slot, still serving
    probe       one replica scores the rollouts under the idle slot, the Quantizers under W_v
    decide      guard.decide: complete, audit, finite, enough, rise
    commit      store.set_committed(artifact), then every replica flips

Whatever fails before commit empties the idle slots again and the live ones serve on: the verdict
is "kept", with the reason. A refused candidate is followed by the same version in bf16, through
the same slots and gate, if guard.on_reject is "bf16" or the caller says must_serve. So is one whose
calibration missed its quorum or its deadline, always: what the missing replicas would have measured
is not known.

The pointer in the store moves *before* the flip. By then the artifact has passed the gate, so it
makes no difference which of the two a generator serves that dies in between: the one that comes
back reads the pointer, and its surviving siblings have flipped. The other order would let a
generator come back with the old version after the run was told that the new one serves. If no
replica flips, the pointer moves back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_ptq import store
from forge_ptq.artifact import ArtifactRef
from forge_ptq.services import guard, publish_metrics
from forge_ptq.services.candidate import Candidate, Publisher
from forge_ptq.services.coordinator import Coordinator
from forge_ptq.services.fleet import FleetError, QuantizerFleet
from forge_ptq.services.merger import StatsMerger
from forge_ptq.services.replicas import PublishError
from forge_ptq.services.sampler import Rollout, RolloutSampler
from forge_ptq.services.schedule import Due, Schedule
from forge_ptq.services.verdict import Rollback, Verdict

if TYPE_CHECKING:
    from forge_ptq.mismatch import SequenceMismatch

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
VERDICTS_KEPT = 1000


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
        self.verdicts: deque[Verdict] = deque(maxlen=VERDICTS_KEPT)
        self.fleet = fleet
        self._publisher = Publisher(cfg, policy, fleet)
        self._schedule = Schedule(cfg, self.sampler)
        self._inject = inject
        self._lock = asyncio.Lock()
        self._closed = False
        self._serving: list[ArtifactRef] = []
        """What serves, last, and what served before it."""

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
        Coordinator actor; started here where they are not given. inject: [{step, fault}] to corrupt
        candidates on purpose.
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
        """A publisher over a fleet that runs; it goes on from what the store says serves."""
        ptq = cls(cfg, policy, fleet, inject)
        committed = await store.get_committed()
        if committed is not None:
            ptq._serving.append(committed)
        return ptq

    async def watch(
        self, training_step: int, records: Sequence[SequenceMismatch], oldest_usable: int
    ) -> Rollback | None:
        """What was trained on says how good what serves is. Call after every training step.

        records: one per trained sequence. oldest_usable: oldest version whose rollouts can still be
        trained on. What fails its probation is taken back: to the last confirmed artifact, else to
        the serving version in bf16. Never raises for what can go wrong in it.
        """
        return None

    def state(self) -> dict[str, Any]:
        """What is remembered between publishes, as JSON; ``attach`` takes it."""
        return {}

    @property
    def served_version(self) -> int:
        """Policy version that new requests get; 0 is the starting checkpoint."""
        return self._serving[-1].policy_version if self._serving else 0

    async def offer(self, episodes: Iterable[Any]) -> None:
        """Take finished episodes (attributes completion, reward, policy_version)."""
        self.sampler.offer(episodes)

    async def publish(self, version: int, must_serve: bool = False) -> Verdict:
        """Quantize, judge and serve a policy version that is complete in the store.

        One publish at a time; a second call waits. must_serve: fall back to bf16 rather than keep
        the old version, unprobed if there are no rollouts to probe with. Never raises for what
        can go wrong in a publish: the verdict is "kept" and says why.
        """
        async with self._lock:
            verdict = Verdict(version=version)
            started = time.perf_counter()
            try:
                await self._publish(verdict, must_serve)
            finally:
                self._publisher.forget_reference()
                verdict.wall_s = time.perf_counter() - started
                self.verdicts.append(verdict)
            await self._retire(version)
        publish_metrics.record(verdict)
        return verdict

    async def close(self) -> None:
        """No publish starts any more; one that runs gets a few seconds to end."""
        self._closed = True
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S), self._lock:
                pass
        except TimeoutError:
            log.warning("a publish was still running when PTQ closed")
        await self.fleet.close()

    async def _publish(self, verdict: Verdict, must_serve: bool) -> None:
        """Fill in the verdict. The only place that decides between candidate, bf16 and keeping."""
        if self._closed:
            verdict.reason = "PTQ is closed"
            return
        if self._serving and verdict.version < self._serving[-1].policy_version:
            verdict.reason = f"version {self._serving[-1].policy_version} serves already"
            return
        if not self.cfg.enabled:
            await self._try(verdict, "accepted", [], scheme="bf16")
            return
        need = self.cfg.probe.min_sequences
        rollouts = self.sampler.probe(self.cfg.probe.sequences, self.cfg.probe.max_tokens)
        if len(rollouts) < need:
            verdict.reason = f"not enough probe rollouts: have {len(rollouts)}, need {need}"
        else:
            try:
                due = self._schedule.due(verdict.version, self.fleet.calibration)
            except PublishError as error:
                verdict.reason = str(error)
            else:
                await self._try(verdict, "accepted", rollouts, due=due)
        to_bf16 = must_serve or verdict.calibration_failed
        to_bf16 |= verdict.refused and "bf16" in self.cfg.guard.on_reject
        if verdict.outcome == "kept" and to_bf16:
            await self._try(verdict, "fell_back", rollouts, scheme="bf16")

    async def _try(
        self,
        verdict: Verdict,
        outcome: Any,
        rollouts: list[Rollout],
        scheme: str | None = None,
        due: Due | None = None,
    ) -> None:
        """One candidate through all phases; on success the verdict gets this outcome."""
        candidate = Candidate(verdict.version, scheme, self._fault(verdict.version, scheme))
        try:
            decision = await self._prepare(candidate, rollouts, due)
            if decision.accepted:
                previous = self._serving[-1] if self._serving else None
                await self._publisher.commit(candidate, previous)
                assert candidate.ref is not None
                self._serving = [*self._serving[-1:], candidate.ref]
                verdict.outcome = outcome
            elif decision.refused and scheme is None:
                verdict.refused = True
                if candidate.fault is None:
                    self._schedule.refused()
            reason = decision.reason
        except Exception as error:
            reason = f"{candidate.phase} failed: {_first_line(error)}"
            log.warning("version %d is not served: %s", verdict.version, reason)
            log.debug("version %d", verdict.version, exc_info=True)
        except asyncio.CancelledError:
            await self._publisher.abandon(candidate)
            raise
        if verdict.outcome == "kept":
            await self._publisher.abandon(candidate)
        prefix = f"{verdict.reason}; then in bf16: " if verdict.reason else ""
        verdict.reason = prefix + reason
        candidate.report(verdict)

    async def _prepare(
        self, candidate: Candidate, rollouts: list[Rollout], due: Due | None
    ) -> guard.Decision:
        """Calibrate if due, quantize, stage, probe, decide."""
        if due is not None:
            await self._publisher.calibrate(candidate, due)
            self._schedule.calibrated(self.fleet.calibration, due)
        if candidate.scheme is None and self._schedule.needed:
            candidate.use(self.fleet.calibration)
        await self._publisher.quantize(candidate)
        await self._publisher.stage(candidate)
        if rollouts:
            await self._publisher.probe(candidate, rollouts)
            drift = self._schedule.watch(self.fleet.last_drift, self.fleet.calibration)
            if drift is not None:
                candidate.drifted(drift)
        # Full precision needs no minimum: its rise is the engine's own numerical noise.
        enough = 1 if candidate.scheme == "bf16" else self.cfg.probe.min_sequences
        limits = guard.Limits(self.cfg.guard.max_perplexity_rise, enough)
        return guard.decide(candidate.evidence(), limits)

    def _fault(self, version: int, scheme: str | None) -> str | None:
        if scheme is not None:
            return None
        for inject in self._inject:
            if inject.step == version:
                log.warning("injecting %s into the candidate of version %d", inject.fault, version)
                return str(inject.fault)
        return None

    async def _retire(self, version: int) -> None:
        """Delete weights older than the version before this one, and artifacts that nobody needs.

        What serves and what served before it stay: a restarting generator may be loading either.
        So does what the pointer names, whatever went wrong in moving it. Every other artifact goes,
        one that a late Quantizer stored after its publish was over too.
        """
        kept = {ref.artifact_id for ref in self._serving[-2:]}
        try:
            committed = await store.get_committed()  # unreadable: nothing is dropped
            if committed is not None:
                kept.add(committed.artifact_id)
            for artifact_id in await store.artifact_ids():
                if artifact_id not in kept:
                    await store.drop_artifact(artifact_id)
            older = [v for v in await store.weight_versions() if v < version]
            for old in older[:-1]:
                await store.drop_weights(old)
        except store.StoreError as error:
            log.warning("clean-up after version %d: %s", version, error)


def _first_line(error: BaseException) -> str:
    """What went wrong, short enough for a reason; the log has the traceback."""
    if isinstance(error, PublishError | FleetError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
