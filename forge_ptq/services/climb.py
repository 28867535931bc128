"""One publish, from the first candidate to what serves in the end: the ladder's arrows taken.

A candidate goes through calibrate (if due), quantize, stage, probe, decide and commit. One that is
refused is followed by what guard.on_reject says; see ladder.py for the states. What fails for
another reason than its quality is followed by bf16 if the version must be served, if on_reject has
it and an earlier candidate was refused, or if a calibration missed its quorum or its deadline: what
the missing replicas would have measured is not known. Otherwise it is followed by nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from forge_ptq.services import guard
from forge_ptq.services.candidate import Candidate
from forge_ptq.services.crew import GRACE_S
from forge_ptq.services.ladder import Step, next_rung, pick
from forge_ptq.services.parts import Parts
from forge_ptq.services.passage import Passage, State
from forge_ptq.services.replicas import PublishError, first_line, to_its_end, within
from forge_ptq.services.sampler import Rollout
from forge_ptq.services.schedule import Due, NotYetError
from forge_ptq.services.serving import FULL_PRECISION, Served
from forge_ptq.services.verdict import Outcome, Verdict

log = logging.getLogger(__name__)


class Climb:
    """Fills in a verdict. ``run`` raises only what a bug or a cancellation raises."""

    def __init__(self, parts: Parts, verdict: Verdict) -> None:
        self.parts = parts
        self.verdict = verdict
        self.passage = Passage(verdict.version)
        self.served = False
        self._to_bf16 = False
        self._retries = 0
        """Demotions that refusals have caused."""

    async def run(self, must_serve: bool) -> None:
        """must_serve: in bf16 rather than not at all."""
        cfg, verdict = self.parts.cfg, self.verdict
        current = self.parts.serving.current
        if current is not None and verdict.version < current.ref.policy_version:
            self._keep(f"version {current.ref.policy_version} serves already")
            return
        if not cfg.enabled:
            await self._full_precision([], "accepted")
            return
        rollouts = self.parts.sampler.probe(cfg.probe.max_sequences, cfg.probe.max_tokens)
        if len(rollouts) < cfg.probe.min_sequences:
            need = cfg.probe.min_sequences
            self._fail(f"not enough probe rollouts: have {len(rollouts)}, need {need}")
        else:
            await self._quantized(rollouts)
        climbs_on = verdict.refused and "bf16" in cfg.guard.on_reject
        must_serve = must_serve or climbs_on or verdict.calibration_failed
        if not self.served and (self._to_bf16 or must_serve):
            await self._full_precision(rollouts, "fell_back")
        elif not self.served:
            self._keep(verdict.reason)

    # ---- the rungs

    async def _quantized(self, rollouts: list[Rollout]) -> None:
        """Quantized candidates, until one serves or the ladder says something else."""
        ladder, verdict = self.parts.ladder, self.verdict
        if (step := ladder.begin()) is not None:
            verdict.promoted = True
            numbers = {"level": ladder.level, "layers": len(step.layers)}
            self._to(State.PROMOTE, "enough good publishes: a demotion is taken back", numbers)
            self._to(State.PREPARE, "as planned but for the demotions left", {})
        while ladder.owed:
            if not await self._pay():
                self._to_bf16 = True
                return
        due = None
        while not self.served and self.passage.state is State.PREPARE:
            if ladder.whole:
                needed = {"good": ladder.streak, "needed": ladder.needed(ladder.steps[-1])}
                verdict.reason, self._to_bf16 = "the whole model is demoted", True
                self._to(State.BF16, verdict.reason, needed)
                return
            if not verdict.attempts:
                try:
                    due = self.parts.schedule.due(verdict.version, self.parts.fleet.calibration)
                except PublishError as error:
                    self._fail(str(error))
                    self._to_bf16 = isinstance(error, NotYetError)
                    return
            fault, mark = self.parts.faults.candidate(verdict.version), len(ladder.condemned)
            candidate = Candidate(verdict.version, None, fault, ladder.overlay, mark)
            await self._try(candidate, rollouts, due)
            due = None
            if self.passage.state is State.REFUSED:
                await self._refused(candidate)

    async def _refused(self, candidate: Candidate) -> None:
        """Take the next rung."""
        cfg, ladder = self.parts.cfg.guard, self.parts.ladder
        assert candidate.manifest is not None
        ladder.failed()
        if candidate.fault is None:
            self.parts.schedule.refused()
        rung = next_rung(cfg.on_reject, self._retries, cfg.demote_attempts)
        step = ladder.again(candidate.manifest.layers)
        if step is None and rung is State.DEMOTE:
            step = await self._ranked()
        if step is not None and (step.layers or step.whole):
            self._retries += 1
            self._demote(step, "the candidate was refused")
        else:
            self._to_bf16 = "bf16" in cfg.on_reject

    async def _pay(self) -> bool:
        """The step that is owed; False if no layers can be ranked now.

        It is the whole model in bf16 where guard.on_reject has no demote, and where nothing is left
        to demote.
        """
        step = self.parts.ladder.again()
        if step is None and "demote" in self.parts.cfg.guard.on_reject:
            step = await self._ranked()
            if step is None:
                return False
        if step is None or not (step.layers or step.whole):
            step = Step(whole=True)
        self._demote(step, "what served failed its probation")
        return True

    async def _ranked(self) -> Step | None:
        """The most sensitive layers one scheme up; without layers if there is none left, None if
        they cannot be ranked."""
        ladder, cfg, verdict = self.parts.ladder, self.parts.cfg, self.verdict
        try:
            work = self.parts.fleet.rank(verdict.version, ladder.overlay)
            moves = await within(work, "rank", cfg.deadlines.quantize_s + 2 * GRACE_S)
        except Exception as error:
            log.debug("ranking layers of version %d", verdict.version, exc_info=True)
            why = f"demote failed: {first_line(error)}"
            self._to(State.FAILED, why, {})
            verdict.reason = verdict.reason or why
            return None
        return Step(pick(moves, cfg.guard.demote_share))

    def _demote(self, step: Step, why: str) -> None:
        """Take a step down."""
        ladder, verdict = self.parts.ladder, self.verdict
        ladder.push(step)
        verdict.demotions += 1
        numbers = {"level": ladder.level, "layers": len(step.layers), "failures": step.failures}
        changed = ", ".join(f"{name} to {scheme}" for name, scheme in sorted(step.layers.items()))
        self._to(State.DEMOTE, f"{why}: {changed or 'the whole model to bf16'}", numbers)
        self._to(State.PREPARE, f"attempt {verdict.demotions} of demotion", {})

    async def _full_precision(self, rollouts: list[Rollout], outcome: Outcome) -> None:
        """This version as it was pushed."""
        if outcome == "fell_back":
            if self.passage.state is not State.BF16:
                self._to(State.BF16, self.verdict.reason, {})
            self._to(State.PREPARE, "in full precision", {})
        few = rollouts[: self.parts.cfg.probe.sequences]
        await self._try(Candidate(self.verdict.version, FULL_PRECISION), few, None, outcome)
        if not self.served:
            self._keep(self.verdict.reason)

    # ---- one candidate

    async def _try(
        self,
        candidate: Candidate,
        rollouts: list[Rollout],
        due: Due | None,
        outcome: Outcome | None = None,
    ) -> None:
        """One candidate through all phases; the passage says how it ended."""
        verdict, serving = self.verdict, self.parts.serving
        verdict.attempts += 1
        try:
            decision = await self._prepare(candidate, rollouts, due)
            reason = decision.reason
            if decision.accepted:
                self._to(State.ACCEPTED, reason, candidate.scored(), candidate)
                if reason := self._guilty(candidate):
                    self._to(State.REFUSED, reason, {}, candidate)
                    verdict.refused = True
                else:
                    reason = decision.reason
                    default: Outcome = "demoted" if candidate.demoted else "accepted"
                    await to_its_end(self._commit(candidate, outcome or default))
            elif decision.refused:
                self._to(State.REFUSED, reason, candidate.scored(), candidate)
                verdict.refused |= candidate.scheme is None
            else:
                self._to(State.FAILED, reason, {}, candidate)
        except Exception as error:
            reason = f"{candidate.phase} failed: {first_line(error)}"
            log.warning("version %d is not served: %s", verdict.version, reason)
            log.debug("version %d", verdict.version, exc_info=True)
            self._to(State.FAILED, reason, {}, candidate)
        except asyncio.CancelledError:
            if self.served:
                self._report(candidate, reason)
            else:
                await self.parts.publisher.abandon(candidate)
            raise
        if not self.served:
            await self.parts.publisher.abandon(candidate)
        self._report(candidate, reason)
        if self.served:
            await self.parts.faults.after_commit(
                verdict.version, serving.policy, self.parts.cfg.deadlines.commit_s
            )

    async def _prepare(
        self, candidate: Candidate, rollouts: list[Rollout], due: Due | None
    ) -> guard.Decision:
        """Calibrate if due, quantize, stage, then probe until the guard decides."""
        publisher, fleet, schedule = self.parts.publisher, self.parts.fleet, self.parts.schedule
        if due is not None:
            try:
                await publisher.calibrate(candidate, due)
            except Exception:
                schedule.failed()
                raise
            schedule.calibrated(fleet.calibration, due)
        if candidate.scheme is None and schedule.needed:
            candidate.use(fleet.calibration)
        await publisher.quantize(candidate)
        if reason := self._guilty(candidate):
            return guard.Decision(False, reason, refused=True)
        await publisher.stage(candidate)
        cfg = self.parts.cfg
        # Full precision needs no minimum: its rise is the engine's own numerical noise.
        limits = guard.Limits.of(cfg, 1 if candidate.scheme else None)
        if not rollouts:
            return guard.decide(candidate.evidence(), limits)
        count = min(cfg.probe.sequences, len(rollouts))
        while True:
            await publisher.probe(candidate, rollouts[:count])
            if candidate.looks == 1:  # later looks see few rollouts
                drift = schedule.watch(fleet.last_drift, fleet.calibration)
                if drift is not None:
                    candidate.drifted(drift)
            more = count < len(rollouts)
            decision = guard.decide(candidate.evidence(), limits, more=more)
            self._to(State.PROBED, decision.reason, candidate.scored(), candidate)
            if not decision.undecided:
                return decision
            count = min(2 * count, len(rollouts))

    def _guilty(self, candidate: Candidate) -> str:
        """Why a candidate must not serve whose plan failed its probation while it was made."""
        if candidate.scheme or not self.parts.ladder.guilty_since(candidate.mark, candidate.plan):
            return ""
        return "its plan failed its probation while it was made"

    async def _commit(self, candidate: Candidate, outcome: Outcome) -> None:
        """It serves from now on; PublishError if that did not work."""
        serving, ladder, ref = self.parts.serving, self.parts.ladder, candidate.ref
        assert ref is not None
        candidate.phase = "commit"
        await serving.commit(ref, candidate.numbers)
        self._to(State.COMMITTED, "every generator replica serves it", {}, candidate)
        served = Served(ref, candidate.plan, self.passage)
        serving.enter(served)
        self.served, self.verdict.outcome = True, outcome
        if served.quantized:
            self._to(State.PROBATION, "live traffic judges it", {}, candidate)
            if reason := self._guilty(candidate):  # found in the moment of the flip
                self._to(State.CONDEMNED, reason, {}, candidate)
                ladder.ban({ref.artifact_id: ref.policy_version})
        else:
            self._to(State.CONFIRMED, "full precision needs no probation", {}, candidate)
        as_meant = candidate.scheme is None or ladder.whole
        if as_meant and self.verdict.attempts == 1 and not self.verdict.demotions:
            ladder.passed()

    # ---- notes

    def _report(self, candidate: Candidate, reason: str) -> None:
        verdict = self.verdict
        how = "in bf16" if candidate.scheme else "demoted"
        prefix = f"{verdict.reason}; then {how}: " if verdict.reason else ""
        verdict.reason = prefix + reason
        candidate.report(verdict, refused=self.passage.state is State.REFUSED)

    def _to(
        self,
        state: State,
        why: str,
        numbers: Mapping[str, float],
        candidate: Candidate | None = None,
    ) -> None:
        ref = candidate.ref if candidate is not None else None
        artifact_id = ref.artifact_id if ref is not None else None
        self.parts.serving.note(self.passage.to(state, why, numbers, artifact_id))

    def _fail(self, reason: str) -> None:
        self._to(State.FAILED, reason, {})
        self.verdict.reason = reason

    def _keep(self, reason: str) -> None:
        self.verdict.reason = reason
        self._to(State.KEEP, reason, {})
