"""A candidate on its way to serving, and the Publisher that moves it through the phases."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from forge_ptq import store
from forge_ptq.artifact import ArtifactRef, Manifest
from forge_ptq.numerics.calibration import Calibration
from forge_ptq.numerics.divergence import Divergence, compare
from forge_ptq.services.crew import GRACE_S
from forge_ptq.services.fleet import CalibrationError
from forge_ptq.services.guard import Evidence, StagedSlot
from forge_ptq.services.replicas import (
    PublishError,
    call_all,
    call_one,
    live_artifact,
    staged_slot,
    survivors,
    within,
)
from forge_ptq.services.sampler import Rollout
from forge_ptq.services.schedule import DriftReport, Due
from forge_ptq.services.verdict import Verdict

log = logging.getLogger(__name__)


@dataclass
class Candidate:
    """One attempt to serve a version. scheme: None for the plan, else one scheme for all layers."""

    version: int
    scheme: str | None = None
    fault: str | None = None
    phase: str = "quantize"
    """Phase it is in, or ended in."""
    ref: ArtifactRef | None = None
    manifest: Manifest | None = None
    staged: list[StagedSlot] = field(default_factory=list)
    divergence: Divergence | None = None
    numbers: dict[str, Any] = field(default_factory=dict)
    """Verdict fields measured on the way."""

    def use(self, live: Calibration) -> None:
        """The calibration behind its scales."""
        self.numbers |= {
            "calibration_round": live.round,
            "calibration_version": live.policy_version,
            "calibration_tokens": live.tokens,
            "contributors": tuple(live.contributors),
            "dropped": tuple(live.dropped),
            "predicted_rise": live.predicted_rise,
        }

    def drifted(self, report: DriftReport) -> None:
        """How far the inputs are from what the scales were made for."""
        self.numbers |= {
            "drift_clipped_fraction": report.clipped_fraction,
            "drift_js_distance": report.js_distance,
            "drift_absmax_ratio": report.absmax_ratio,
            "drift_layer": report.layer,
            "drift_exceeded": report.exceeded,
        }

    def evidence(self) -> Evidence:
        """What the guard decides on."""
        assert self.manifest is not None
        return Evidence(
            self.manifest.artifact_id, self.manifest.layers, self.staged, self.divergence
        )

    def report(self, verdict: Verdict) -> None:
        """Copy what was measured into the verdict; times add up over attempts.

        Scores of a bf16 candidate do not replace those of the refused one before it.
        """
        for name, value in self.numbers.items():
            before = getattr(verdict, name)
            if before is not None and name in ("calibrate_s", "quantize_s", "stage_s", "probe_s"):
                value += before
            if before is not None and name in ("pause_s", "flip_s"):
                value = max(value, before)
            setattr(verdict, name, value)
        if self.ref is not None:
            verdict.artifact_id = self.ref.artifact_id
        if self.divergence is None or verdict.perplexity_rise is not None:
            return
        measured = self.divergence
        verdict.perplexity_rise, verdict.ci = measured.perplexity_rise, measured.ci
        verdict.kl, verdict.nll_rise = measured.kl, measured.nll_rise
        verdict.nll_perplexity_rise = measured.nll_perplexity_rise
        verdict.worst_sequence_rise = measured.worst_sequence_rise
        verdict.probe_tokens, verdict.probe_sequences = measured.tokens, measured.sequences


def flop_share(manifest: Manifest) -> dict[str, float]:
    """{scheme: its share of the linear layers' FLOPs}, which go with the elements of a weight."""
    totals: Counter[str] = Counter()
    for name, scheme in manifest.layers.items():
        totals[scheme] += math.prod(manifest.tensors[f"{name}.weight"].shape)
    everything = totals.total() or 1
    return {scheme: totals[scheme] / everything for scheme in sorted(totals)}


class Publisher:
    """Talks to the quantizers, the store and the generator; keeps no opinion of its own.

    The fleet holds its rounds to the same deadlines and then says what is missing and why, so it
    is given a little longer here: this limit is for when the fleet itself does not return.
    """

    def __init__(self, cfg: Any, policy: Any, fleet: Any) -> None:
        """policy: handle of the generator. fleet: fleet.QuantizerFleet."""
        self.cfg = cfg
        self.policy = policy
        self.fleet = fleet
        self._reference: tuple[int, list[Rollout], list[Any]] | None = None

    async def calibrate(self, candidate: Candidate, due: Due) -> None:
        """Make scales, smoothing and plan anew on the candidate's weights.

        CalibrationError if too much of it is missing by the deadlines.
        """
        candidate.phase = "calibrate"
        started, limit = time.perf_counter(), self.cfg.deadlines.calibrate_s
        candidate.numbers["calibration_reason"] = due.reason
        work = self.fleet.calibrate(candidate.version, due.rollouts, due.plan_rollouts)
        try:
            await within(work, "calibrate", limit)
            candidate.numbers["calibrated"] = True
        except (CalibrationError, PublishError, TimeoutError) as error:
            candidate.numbers["calibration_failed"] = True
            raise CalibrationError(str(error)) from error
        finally:
            candidate.numbers["calibrate_s"] = time.perf_counter() - started

    async def quantize(self, candidate: Candidate) -> None:
        """Quantize the version with the live scales: sets candidate.ref and manifest."""
        candidate.phase = "quantize"
        started = time.perf_counter()
        limit = self.cfg.deadlines.quantize_s + 2 * GRACE_S
        work = self.fleet.quantize(candidate.version, candidate.scheme, candidate.fault)
        candidate.ref = await within(work, "quantize", limit)
        candidate.manifest = await store.get_manifest(candidate.ref)
        counts = Counter(candidate.manifest.layers.values())
        candidate.numbers |= {
            "quantize_s": time.perf_counter() - started,
            "bytes": candidate.manifest.nbytes,
            "scheme": " ".join(f"{name}:{count}" for name, count in sorted(counts.items())),
            "flop_share": flop_share(candidate.manifest),
        }

    async def stage(self, candidate: Candidate) -> None:
        """Every replica fills its idle slot and says what it now holds."""
        candidate.phase = "stage"
        started, limit = time.perf_counter(), self.cfg.deadlines.stage_s
        results = await call_all(self.policy, "stage", candidate.ref, deadline_s=limit)
        survivors(results, "stage")
        descriptions = await call_all(self.policy, "describe", deadline_s=limit)
        candidate.staged = [staged_slot(d) for d in survivors(descriptions, "audit")]
        candidate.numbers["stage_s"] = time.perf_counter() - started

    async def probe(self, candidate: Candidate, rollouts: list[Rollout]) -> None:
        """Score the same tokens under W_v and under the idle slot of one replica."""
        from forge_ptq.engine.types import ProbeSequence

        candidate.phase = "probe"
        started, limit = time.perf_counter(), self.cfg.deadlines.probe_s
        hidden = await self._reference_hidden(candidate.version, rollouts)
        sequences = [
            ProbeSequence(rollout.token_ids, rollout.response_start, hidden_RH)
            for rollout, hidden_RH in zip(rollouts, hidden, strict=True)
        ]
        scores = await call_one(self.policy, "probe", sequences, deadline_s=limit)
        candidate.divergence = compare(
            [score.logprobs for score in scores],
            [score.reference_logprobs for score in scores],
            [score.kl for score in scores],
        )
        candidate.numbers["probe_s"] = time.perf_counter() - started

    async def _reference_hidden(self, version: int, rollouts: list[Rollout]) -> list[Any]:
        """W_v's hidden states; the second candidate of a version reuses them."""
        if self._reference is None or self._reference[:2] != (version, rollouts):
            work = self.fleet.reference(version, rollouts)
            limit = self.cfg.deadlines.probe_s + 2 * GRACE_S
            hidden = await within(work, "reference", limit)
            self._reference = (version, rollouts, hidden)
        return self._reference[2]

    def forget_reference(self) -> None:
        """Drop the hidden states kept for a second candidate."""
        self._reference = None

    async def commit(self, candidate: Candidate, previous: ArtifactRef | None) -> None:
        """Move the pointer, flip every replica, and make sure that all serve the artifact.

        Raises PublishError if none does. The pointer is then moved back, unless the store does not
        answer: it may name either artifact until the next commit.
        """
        candidate.phase = "commit"
        ref = candidate.ref
        assert ref is not None
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
        if len(reports) < len(results):
            log.warning("a generator replica died in commit; it comes back with the new artifact")
        for report in reports:
            candidate.numbers |= {
                "flip_s": max(report.flip_s, candidate.numbers.get("flip_s", 0.0)),
                "pause_s": max(report.pause_s, candidate.numbers.get("pause_s", 0.0)),
                "step_s_median": report.step_s_median,
            }
        if not reports and not await self._settle(ref, previous):
            raise PublishError("every generator replica died, and none came back with it")

    async def _settle(self, ref: ArtifactRef, previous: ArtifactRef | None) -> bool:
        """After a commit that went wrong: whether ref serves now. Never raises.

        If it does not, the pointer is moved back.

        Replicas that came back meanwhile may still serve the previous artifact while others have
        flipped: those are staged and flipped once more.
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
            try:
                await call_all(self.policy, "stage", ref, deadline_s=limit)
                await call_all(self.policy, "commit", ref.artifact_id, deadline_s=limit)
            except Exception as error:
                log.warning("some replicas stay behind %s: %s", ref.artifact_id, error)
                log.debug("commit of %s", ref.artifact_id, exc_info=True)
        return True

    async def _restore(self, previous: ArtifactRef | None) -> None:
        """Move the pointer back as far as the store lets us."""
        try:
            await store.set_committed(previous)
        except store.StoreError as error:
            log.warning("the pointer could not be moved back: %s", error)

    async def _live(self, limit: float) -> list[str | None]:
        descriptions = await call_all(self.policy, "describe", deadline_s=limit)
        return [live_artifact(description) for description in descriptions if description]

    async def abandon(self, candidate: Candidate) -> None:
        """Empty the idle slots; the live ones are not touched. Never raises: it is the clean-up."""
        if candidate.ref is None:
            return
        try:
            await call_all(self.policy, "discard", deadline_s=self.cfg.deadlines.commit_s)
        except Exception as error:
            log.warning("discarding the candidate of version %d: %s", candidate.version, error)
            log.debug("version %d", candidate.version, exc_info=True)
