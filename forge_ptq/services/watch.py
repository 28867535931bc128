"""After the commit: live traffic judges what serves, and what fails is taken back.

Judging is immediate and needs no lock: a plan found guilty is condemned at once, so that a publish
under way does not serve one more candidate of it. Taking back needs the idle slots, so it waits for
such a publish to end; if that has replaced the guilty artifact meanwhile nothing is left to do.

What is gone back to, in this order:

    exactly      the last confirmed artifact, if rollouts of its version can still be trained on;
                 after an A/B test none of the plan that failed it
    in bf16      the version that serves, as it was pushed

If neither works the guilty artifact serves on and the next call tries again; the next publish is a
demotion anyway.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_ptq import store
from forge_ptq.artifact import ArtifactRef
from forge_ptq.engine.admission import Arm
from forge_ptq.services import guard, publish_metrics
from forge_ptq.services.ab import ABTest
from forge_ptq.services.candidate import Candidate
from forge_ptq.services.parts import Parts
from forge_ptq.services.passage import Passage, State, finite
from forge_ptq.services.probation import Judgement, Probation
from forge_ptq.services.replicas import PublishError, to_its_end
from forge_ptq.services.sampler import prompt_digest
from forge_ptq.services.serving import FULL_PRECISION, Served
from forge_ptq.services.verdict import Rollback

if TYPE_CHECKING:
    from forge_ptq.mismatch import SequenceMismatch

log = logging.getLogger(__name__)


class Watch:
    """See the module's docstring."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.probation = Probation(parts.cfg.guard.probation)
        self._reason = ""
        self._ab: ABTest | None = None
        self._ab_plan = FULL_PRECISION

    def begin(self) -> None:
        """Watch what serves now, unless it has been found guilty already."""
        current = self.parts.serving.current
        if current is not None and current.quantized and not self.guilty:
            self.probation.serves(current.ref.artifact_id, current.plan)

    # ---- evidence

    def offer(self, episodes: Iterable[Any]) -> None:
        """Finished episodes, all of a prompt in one call: an A/B test takes the prompts whose arm
        was drawn, of the plan that serves."""
        test = self._test()
        if test is None:
            return
        prompts: dict[object, list[Any]] = {}
        for episode in episodes:
            digest = prompt_digest(episode.completion.prompt_ids)
            prompts.setdefault(digest, []).append(episode)
        for group in prompts.values():
            rewards = [math.nan if e.reward is None else float(e.reward) for e in group]
            arm = self._arm(group)
            if arm is not None and all(map(math.isfinite, rewards)):
                test.add(arm, rewards)

    def _arm(self, group: Sequence[Any]) -> Arm | None:
        """Where all samples of a prompt were made, by the plan under test; None if that is not so.

        One that was restarted is among the long ones, which earn otherwise than the rest: without
        it the others would stand for a prompt that they are no fair sample of.
        """
        found = {self._origin(getattr(e.completion, "metadata", None) or {}) for e in group}
        return found.pop() if len(found) == 1 else None

    def _origin(self, metadata: Mapping[str, Any]) -> Arm | None:
        arm: Arm | None = metadata.get("arm")
        fair = metadata.get("drawn") and not metadata.get("resubmitted")
        if not fair or arm not in ("live", "companion"):
            return None
        plan = self.parts.serving.plan_behind(metadata.get("artifact_id", ""))
        return arm if plan == self._ab_plan else None

    def _test(self) -> ABTest | None:
        """The A/B test of the plan that serves; None if there is none."""
        current = self.parts.serving.current
        if not self.parts.cfg.ab.enabled or current is None or not current.quantized:
            return None
        if self._ab is None or self._ab_plan != current.plan:
            self._ab, self._ab_plan = ABTest(self.parts.cfg.ab), current.plan
        return self._ab

    def judge(self, records: Sequence[SequenceMismatch]) -> None:
        """Take in what was trained on; confirm and condemn."""
        for record in records:
            self.probation.add(record)
        for judgement in self.probation.judge():
            publish_metrics.record_judgement(judgement)
            self._act(judgement)
        test = self._test()
        if test is None:
            return
        report = test.verdict()
        publish_metrics.record_ab(report)
        if report.failed:
            numbers = finite(
                {
                    "agreement": report.agreement,
                    "difference": report.difference,
                    "p_value": report.p_value,
                    "limit": report.limit,
                }
            )
            reason = (
                f"reward agreement {report.agreement:.1%} with full precision, limit "
                f"{self.parts.cfg.ab.min_agreement:.1%}, p = {report.p_value:.3g} under "
                f"{report.limit:.3g}"
            )
            # Prompts of all its artifacts went into the test; that the trainer agrees with one of
            # them, which is what confirms it, says nothing of rewards.
            history = self.parts.serving.history
            bad = [s.ref.artifact_id for s in history if s.plan == self._ab_plan]
            self._condemn(self._ab_plan, bad, reason, numbers)

    def _act(self, judgement: Judgement) -> None:
        serving = self.parts.serving
        if judgement.over:
            log.warning("probation of plan %s: %s", judgement.plan, judgement.over)
        else:
            for artifact_id in judgement.good:
                served = serving.find(artifact_id)
                if served is not None and served.passage.state is State.PROBATION:
                    why = "live traffic agrees with the trainer"
                    numbers = judgement.numbers
                    serving.note(served.passage.to(State.CONFIRMED, why, numbers, artifact_id))
        current = serving.current
        relevant = {serving.last_plan} | ({current.plan} if current else set())
        if judgement.failed and judgement.plan in relevant:
            reason = f"probation failed: {judgement.over}"
            self._condemn(judgement.plan, judgement.bad, reason, judgement.numbers)

    def _condemn(
        self, plan: str, bad: Sequence[str], reason: str, numbers: Mapping[str, float]
    ) -> None:
        """No candidate of the plan is served as it is; what serves of it is to be taken back."""
        serving, self._reason = self.parts.serving, reason
        guilty = {}
        for served in serving.history:
            artifact_id = served.ref.artifact_id
            # What its own traffic has confirmed is not guilty of what others of its plan did.
            serves = served is serving.current and served.plan == plan and not served.confirmed
            if not serves and artifact_id not in bad:
                continue
            guilty[artifact_id] = served.ref.policy_version
            if served.passage.state in (State.PROBATION, State.CONFIRMED):
                serving.note(served.passage.to(State.CONDEMNED, reason, numbers, artifact_id))
        self.parts.ladder.condemn(plan, guilty)
        self.probation.forget(plan, guilty)
        self._ab = None

    # ---- taking back

    @property
    def guilty(self) -> bool:
        """Whether what serves is to be taken back."""
        current = self.parts.serving.current
        return current is not None and current.ref.artifact_id in self.parts.ladder.banned

    async def take_back(self, oldest_usable: int) -> Rollback | None:
        """Make something else serve; None, and why in the log, if that did not work.

        A cancellation ends it while nothing has moved, else it waits until all of it has.
        """
        started, guilty = time.perf_counter(), self.parts.serving.current
        assert guilty is not None
        if (rollback := await self._exactly(guilty, oldest_usable, started)) is None:
            try:
                rollback = await self._in_bf16(guilty, started)
            except Exception as error:
                version = guilty.ref.policy_version
                log.warning("version %d could not be taken back: %s", version, error)
                log.debug("version %d", version, exc_info=True)
                return None
        log.warning("%s", rollback)
        return rollback

    async def _exactly(self, guilty: Served, oldest_usable: int, started: float) -> Rollback | None:
        """To the last confirmed artifact that is there and young enough; None if none can be."""
        serving = self.parts.serving

        async def go_back(target: Served) -> Rollback:
            behind = await serving.go_back(target.ref)
            return self._taken_back(guilty, target, started, behind)

        for target in list(serving.targets()):
            young = target.ref.policy_version >= oldest_usable
            if not young or target.ref.artifact_id in self.parts.ladder.banned:
                continue
            brought = Candidate(target.ref.policy_version, ref=target.ref)
            try:
                await store.get_manifest(target.ref)
                await serving.bring(target.ref)
                return await to_its_end(go_back(target))
            except BaseException as error:
                if serving.current is guilty:  # a replica may still be staging it
                    await self.parts.publisher.abandon(brought)
                if not isinstance(error, Exception):
                    raise
                log.warning("no way back to %s: %s", target.ref.artifact_id, error)
                log.debug("rollback to %s", target.ref.artifact_id, exc_info=True)
        return None

    async def _in_bf16(self, guilty: Served, started: float) -> Rollback:
        """To the version that serves, as it was pushed."""
        publisher, serving, cfg = self.parts.publisher, self.parts.serving, self.parts.cfg
        version = guilty.ref.policy_version
        candidate = Candidate(version, FULL_PRECISION)

        async def commit(ref: ArtifactRef) -> Rollback:
            await serving.commit(ref, candidate.numbers)
            served = Served(ref, FULL_PRECISION, Passage(version, State.CONFIRMED))
            return self._taken_back(guilty, served, started)

        try:
            await publisher.quantize(candidate)
            await publisher.stage(candidate)
            decision = guard.decide(candidate.evidence(), guard.Limits.of(cfg, 1))
            if not decision.accepted:
                raise PublishError(decision.reason)
            assert candidate.ref is not None
            return await to_its_end(commit(candidate.ref))
        except BaseException:
            if serving.current is guilty:
                await publisher.abandon(candidate)
            raise

    def _taken_back(
        self, guilty: Served, served: Served, started: float, behind: int | None = None
    ) -> Rollback:
        """The other one serves now. behind: of an exact rollback."""
        serving, exact = self.parts.serving, behind is not None
        reason = self._reason or "rolled back before"
        old, new = guilty.ref, served.ref
        if guilty.passage.state in (State.PROBATION, State.CONFIRMED):  # of an earlier session
            serving.note(guilty.passage.to(State.CONDEMNED, reason, {}, old.artifact_id))
        numbers = {"to_version": new.policy_version, "exact": exact, "behind": behind or 0}
        serving.note(guilty.passage.to(State.ROLLED_BACK, reason, numbers, old.artifact_id))
        serving.enter(served)
        self.probation.forget(served.plan, [old.artifact_id])
        return Rollback(
            version_from=old.policy_version,
            version_to=new.policy_version,
            artifact_from=old.artifact_id,
            artifact_to=new.artifact_id,
            reason=reason,
            exact=exact,
            behind=behind or 0,
            transitions=(),
            seconds=time.perf_counter() - started,
        )

    # ---- memory

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "probation": self.probation.state(),
            "reason": self._reason,
            "ab_plan": self._ab_plan,
            "ab": None if self._ab is None else self._ab.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``; ValueError for anything else."""
        try:
            self._reason = str(state["reason"])
            self.probation.restore(state["probation"])
            self._ab_plan = str(state["ab_plan"])
            if state["ab"] is not None and self.parts.cfg.ab.enabled:
                self._ab = ABTest(self.parts.cfg.ab)
                self._ab.restore(state["ab"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"watch: not a stored state: {error!r}") from error
