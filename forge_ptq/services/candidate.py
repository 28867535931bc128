"""A candidate on its way to serving, and the Publisher that moves it through the phases."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from forge_ptq import store
from forge_ptq.artifact import ArtifactRef, Manifest
from forge_ptq.numerics.calibration import Calibration
from forge_ptq.numerics.divergence import Divergence, compare
from forge_ptq.services.crew import GRACE_S
from forge_ptq.services.fleet import CalibrationError
from forge_ptq.services.guard import Evidence, Limits, StagedSlot
from forge_ptq.services.passage import finite
from forge_ptq.services.replicas import (
    PublishError,
    call_all,
    call_one,
    staged_slot,
    survivors,
    within,
)
from forge_ptq.services.sampler import Rollout
from forge_ptq.services.schedule import DriftReport, Due
from forge_ptq.services.serving import FULL_PRECISION, plan_of
from forge_ptq.services.verdict import Verdict

log = logging.getLogger(__name__)


@dataclass
class Candidate:
    """One attempt to serve a version. scheme: None for the plan, else one scheme for all layers.

    overlay: layers that are demoted. mark: how many plans had been condemned when it was begun.
    """

    version: int
    scheme: str | None = None
    fault: str | None = None
    overlay: Mapping[str, str] = field(default_factory=dict)
    mark: int = 0
    phase: str = "quantize"
    """Phase it is in, or ended in."""
    ref: ArtifactRef | None = None
    manifest: Manifest | None = None
    staged: list[StagedSlot] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    """engine.types.ProbeScore of the rollouts scored so far, in order."""
    divergence: Divergence | None = None
    looks: int = 0
    numbers: dict[str, Any] = field(default_factory=dict)
    """Verdict fields measured on the way."""

    @property
    def plan(self) -> str:
        """See ``serving.plan_of``; full precision before it is made."""
        return FULL_PRECISION if self.manifest is None else plan_of(self.manifest.layers)

    @property
    def demoted(self) -> tuple[str, ...]:
        """Layers that are in a better scheme than planned."""
        if self.manifest is None:
            return ()
        used, asked = self.manifest.layers, self.manifest.asked
        return tuple(name for name in self.overlay if used.get(name) != asked.get(name))

    def scored(self) -> dict[str, float]:
        """The numbers that the guard saw, for transitions."""
        numbers: dict[str, float | None] = {"weight_error": self.numbers.get("weight_error")}
        if (measured := self.divergence) is not None:
            numbers |= {
                "perplexity_rise": measured.perplexity_rise,
                "low": measured.ci[0],
                "high": measured.ci[1],
                "worst_rise": measured.worst_sequence_rise,
                "token_kl": measured.token_kl,
                "tokens": measured.tokens,
                "rollouts": measured.sequences,
            }
        return finite(numbers)

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
            self.manifest.artifact_id,
            self.manifest.layers,
            self.staged,
            self.divergence,
            self.manifest.weight_error,
        )

    def report(self, verdict: Verdict, refused: bool = False) -> None:
        """Copy what was measured into the verdict; times add up over attempts.

        Scores are those of the last quantized candidate: of a bf16 one only if there is no other.
        refused: the guard turned this one down.
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
        if self.divergence is None or (self.scheme and verdict.perplexity_rise is not None):
            return
        measured = self.divergence
        if refused and self.scheme is None:
            rises = [r for r in (verdict.refused_rise, measured.perplexity_rise) if r is not None]
            verdict.refused_rise = max(rises, key=lambda rise: (math.isnan(rise), rise))
        verdict.token_kl, verdict.probe_looks = measured.token_kl, self.looks
        verdict.perplexity_rise, verdict.ci = measured.perplexity_rise, measured.ci
        verdict.kl, verdict.nll_rise = measured.kl, measured.nll_rise
        verdict.nll_perplexity_rise = measured.nll_perplexity_rise
        verdict.worst_sequence_rise = measured.worst_sequence_rise
        verdict.context_ess = measured.context_ess
        verdict.probe_tokens, verdict.probe_sequences = measured.tokens, measured.sequences


def share_of(manifest: Manifest, names: Collection[str]) -> float:
    """Share of the linear layers' FLOPs that these layers have."""
    size = {name: math.prod(manifest.tensors[f"{name}.weight"].shape) for name in manifest.layers}
    return sum(size[name] for name in names) / (sum(size.values()) or 1)


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
        work = self.fleet.quantize(
            candidate.version, candidate.scheme, candidate.fault, candidate.overlay
        )
        candidate.ref = await within(work, "quantize", limit)
        manifest = candidate.manifest = await store.get_manifest(candidate.ref)
        counts = Counter(manifest.layers.values())
        candidate.numbers |= {
            "quantize_s": time.perf_counter() - started,
            "bytes": manifest.nbytes,
            "scheme": " ".join(f"{name}:{count}" for name, count in sorted(counts.items())),
            "flop_share": flop_share(manifest),
            "demoted_share": share_of(manifest, candidate.demoted),
        }
        if candidate.scheme is None:
            candidate.numbers["code_flip_fraction"] = self.fleet.last_flips
        if manifest.weight_error:
            worst = max(manifest.weight_error, key=lambda name: manifest.weight_error[name])
            error = manifest.weight_error[worst]
            candidate.numbers |= {"weight_error": error, "weight_error_layer": worst}

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
        """Score the same tokens under W_v and under the idle slot of one replica.

        Of what was scored before (a prefix of rollouts) the scores are kept.
        """
        from forge_ptq.engine.types import ProbeSequence

        candidate.phase = "probe"
        candidate.looks += 1
        started, limit = time.perf_counter(), self.cfg.deadlines.probe_s
        hidden = await self._reference_hidden(candidate.version, rollouts)
        done = len(candidate.scores)
        sequences = [
            ProbeSequence(rollout.token_ids, rollout.response_start, hidden_RH)
            for rollout, hidden_RH in zip(rollouts[done:], hidden[done:], strict=True)
        ]
        if sequences:
            candidate.scores += await call_one(self.policy, "probe", sequences, deadline_s=limit)
        candidate.divergence = compare(
            [score.logprobs for score in candidate.scores],
            [score.reference_logprobs for score in candidate.scores],
            [score.kl for score in candidate.scores],
            behaviour_GR=[rollout.behaviour() for rollout in rollouts],
            clusters_G=[rollout.group for rollout in rollouts],
            confidence=Limits.of(self.cfg).look_confidence,
        )
        taken = time.perf_counter() - started
        candidate.numbers["probe_s"] = candidate.numbers.get("probe_s", 0.0) + taken

    async def _reference_hidden(self, version: int, rollouts: list[Rollout]) -> list[Any]:
        """W_v's hidden states of the rollouts; those known of a prefix, from an earlier look or
        candidate of the version, are not computed again."""
        if self._reference is None or self._reference[0] != version:
            self._reference = (version, [], [])
        _, known, hidden = self._reference
        same = 0
        while same < min(len(known), len(rollouts)) and known[same] is rollouts[same]:
            same += 1
        if same < len(rollouts):
            work = self.fleet.reference(version, rollouts[same:])
            limit = self.cfg.deadlines.probe_s + 2 * GRACE_S
            hidden = hidden[:same] + await within(work, "reference", limit)
            self._reference = (version, list(rollouts), hidden)
        return hidden[: len(rollouts)]

    def forget_reference(self) -> None:
        """Drop the hidden states kept for further looks and candidates."""
        self._reference = None

    async def abandon(self, candidate: Candidate) -> None:
        """Empty the idle slots; the live ones are not touched. Never raises: it is the clean-up."""
        if candidate.ref is None:
            return
        try:
            await call_all(self.policy, "discard", deadline_s=self.cfg.deadlines.commit_s)
        except Exception as error:
            log.warning("discarding the candidate of version %d: %s", candidate.version, error)
            log.debug("version %d", candidate.version, exc_info=True)
