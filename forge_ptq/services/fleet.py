"""QuantizerFleet: what the rest of the program sees of all Quantizer replicas.

    fleet = await QuantizerFleet.launch(cfg.ptq, quantizer, merger, coordinator)
    calibration = await fleet.calibrate(version, rollouts, plan_rollouts)
    ref = await fleet.quantize(version)                 # artifact in the store, manifest last
    moves = await fleet.rank(version, overlay)          # which layers to demote next
    hidden = await fleet.reference(version, rollouts)   # and fleet.last_drift
    await fleet.close()

Everything is done in rounds (round.py, crew.py): replicas pull items, whoever dies or hangs is
replaced, every round has a deadline. A calibration is

    pass A      (smoothing on) statistics of the raw inputs, a share of the batches per item
    smooth      one item: factors from the merged statistics of pass A
    pass B      statistics of the smoothed inputs
    plan        one item: ranges, and in mode auto the scheme of every layer

A pass has floor(replicas / oversample) shares, at least one; the replicas beyond stand by and take
over. Its statistics come through the store and the merger. Shares that are missing at the deadline
or left out by the merger count against the quorum; below it CalibrationError says what was missing.
A replica whose statistics are not finite reports that as an error, and another one tries the share:
so a broken replica is survived, and broken weights are not.

One operation runs at a time; a second one waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from forge_ptq import store, store_stats
from forge_ptq.artifact import ArtifactRef
from forge_ptq.manifest import assemble_manifest, new_artifact_id
from forge_ptq.numerics.calibration import Calibration, CalibrationFormatError
from forge_ptq.services.calibrating import CalibrationError, misfit, run_calibration
from forge_ptq.services.coordinator import Report
from forge_ptq.services.crew import Crew, FleetError
from forge_ptq.services.fleet_parts import chunks, drift_of, record_of
from forge_ptq.services.ladder import Move
from forge_ptq.services.replicas import call_one
from forge_ptq.services.round import Item
from forge_ptq.services.sampler import Rollout
from forge_ptq.services.work import (
    PartDone,
    Quantize,
    Rank,
    RankDone,
    Reference,
    ReferenceDone,
)

__all__ = ["CalibrationError", "FleetError", "QuantizerFleet"]

log = logging.getLogger(__name__)

REPORTS_KEPT = 16

PARTS_PER_REPLICA = 2
"""Items per replica in rounds that anybody can share: a dead one costs half of its work."""


class QuantizerFleet:
    """See the module's docstring. Made by ``launch``; lives in the client."""

    def __init__(self, cfg: Any, crew: Crew, merger: Any) -> None:
        self.cfg = cfg
        self.crew = crew
        self.merger = merger
        self.calibration: Calibration | None = None
        """The live one: the last that succeeded."""
        self.last_flips: float | None = None
        """Share of the int8 codes of the last ``quantize`` that differ from the version before;
        None if there was nothing to compare."""
        self.last_drift: Mapping[str, Any] = {}
        """Site -> Drift, measured during the last ``reference`` with a calibration live."""
        self.reports: deque[tuple[str, Report]] = deque(maxlen=REPORTS_KEPT)
        """(kind, report) of the last rounds: who did what, who was lost. Without the results."""
        self._lock = asyncio.Lock()

    @classmethod
    async def launch(
        cls, cfg: Any, quantizer: Any, merger: Any, coordinator: Any
    ) -> QuantizerFleet:
        """cfg: config.PTQConfig. quantizer: a Quantizer service (or actor), or a list of such,
        which may differ in their number of processes. merger: a StatsMerger service (or actor).
        coordinator: a Coordinator actor. A calibration that the store has is live again if it was
        made for this model and plan.
        """
        quantizers = list(quantizer) if isinstance(quantizer, list | tuple) else [quantizer]
        crew = Crew(quantizers, coordinator, cfg.merge.heartbeat_s)
        fleet = cls(cfg, crew, merger)
        fleet.calibration = await fleet._restored()
        return fleet

    async def _restored(self) -> Calibration | None:
        """The last calibration in the store; None, and why in the log, if it cannot be used."""
        rounds = await store_stats.calibration_rounds()
        if not rounds:
            return None
        try:
            found = await store_stats.get_calibration(rounds[-1])
        except (store.StoreError, CalibrationFormatError) as error:
            log.warning("calibration %d is not used: %s", rounds[-1], error)
            return None
        try:
            limit = self.cfg.merge.deadline_s
            status = await call_one(self.crew.quantizers[0], "status", deadline_s=limit)
        except (RuntimeError, TimeoutError) as error:
            log.warning("calibration %d is not used: no quantizer answers: %s", rounds[-1], error)
            return None
        reason = misfit(found, status.layout, list(status.layers), self.cfg.plan)
        if reason is not None:
            log.warning("calibration %d is not used: %s", rounds[-1], reason)
            return None
        return found

    async def calibrate(
        self,
        version: int,
        rollouts: Sequence[Rollout],
        plan_rollouts: Sequence[Rollout] = (),
    ) -> Calibration:
        """A new calibration on policy ``version``, stored and live from now on.

        plan_rollouts: what plans are measured on, for plan.mode auto. CalibrationError with the
        reason if it did not work; the calibration before stays live then.
        """
        async with self._lock:
            self.calibration = await run_calibration(self, version, rollouts, plan_rollouts)
            return self.calibration

    async def quantize(
        self,
        version: int,
        scheme: str | None = None,
        fault: str | None = None,
        overlay: Mapping[str, str] | None = None,
    ) -> ArtifactRef:
        """Quantize a version with the live calibration and store the artifact under a fresh id.

        scheme: one scheme for every layer instead of the plan ("bf16": plain weights). fault:
        "corrupt_scales" makes a wrong artifact with right hashes, for demonstrations. overlay: as
        planned, but these layers so, where that is better than planned. FleetError naming what is
        missing, as for weights that are not finite.
        """
        if fault not in (None, "corrupt_scales"):
            raise ValueError(f"fault: expected corrupt_scales or None, got {fault!r}")
        async with self._lock:
            calibration = None if scheme == "bf16" else self.calibration
            artifact_id = new_artifact_id(version)
            replicas = await self.crew.size()
            parts = 1 if replicas == 1 else PARTS_PER_REPLICA * replicas
            items = [
                Item(
                    f"part-{number}",
                    Quantize(
                        version,
                        artifact_id,
                        number,
                        parts,
                        scheme,
                        calibration.round if calibration else None,
                        corrupt=fault is not None,
                        overlay=dict(overlay or {}),
                    ),
                )
                for number in range(parts)
            ]
            try:
                results = await self.complete("quantize", items, self.cfg.deadlines.quantize_s)
                return await self._finish(artifact_id, version, calibration, results)
            except BaseException:
                await _forget(artifact_id)
                raise

    async def rank(
        self, version: int, overlay: Mapping[str, str] | None = None
    ) -> tuple[Move, ...]:
        """Moves of fused layers to the next better scheme, most useful first, from the plan with
        these layers overlaid. By the live calibration's statistics; see ``planning.rank_moves``.
        """
        async with self._lock:
            round_ = self.calibration.round if self.calibration is not None else None
            items = [Item("rank", Rank(version, round_, dict(overlay or {})))]
            done: list[RankDone]
            done = await self.complete("rank", items, self.cfg.deadlines.quantize_s)
            return done[0].moves

    async def reference(self, version: int, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
        """Final-normed hidden states [R, H] of a version, one tensor a rollout, in order.

        R = len(token_ids) - response_start; row i predicts token response_start + i. With a live
        calibration the static layers' inputs are measured on the way: ``last_drift``.
        """
        if not rollouts:
            return []
        async with self._lock:
            live = self.calibration
            round_ = live.round if live is not None and live.stats else None
            pieces = chunks(rollouts, PARTS_PER_REPLICA * await self.crew.size())
            items = [
                Item(f"rollouts-{number}", Reference(version, chunk, round_))
                for number, chunk in enumerate(pieces)
            ]
            results: list[ReferenceDone]
            results = await self.complete("reference", items, self.cfg.deadlines.probe_s)
            self.last_drift = await asyncio.to_thread(drift_of, results, live) if live else {}
            return [hidden_RH for result in results for hidden_RH in result.hidden]

    async def close(self) -> None:
        """Stop waiting for replicas that are left behind. Ends no replica."""
        await self.crew.close()

    async def hold(self, kind: str, items: Sequence[Item], deadline_s: float) -> Report:
        """One round; what went wrong on the way is logged."""
        report = await self.crew.hold(kind, items, deadline_s)
        outcome = report.outcome
        brief = replace(outcome, finished=dict.fromkeys(outcome.finished))
        self.reports.append((kind, replace(report, outcome=brief)))
        for item, before, after in outcome.takeovers:
            log.warning("%s %s: taken over from %s by %s", kind, item, before, after)
        for item, reason in outcome.missing.items():
            log.warning("%s %s is missing: %s", kind, item, reason)
        return report

    async def complete(self, kind: str, items: Sequence[Item], deadline_s: float) -> list[Any]:
        """Results of a round that needs them all, in the order of the items; else FleetError."""
        outcome = (await self.hold(kind, items, deadline_s)).outcome
        if outcome.missing:
            reasons = "; ".join(f"{item} {reason}" for item, reason in outcome.missing.items())
            raise FleetError(
                f"{kind}: {len(outcome.missing)} of {len(items)} items missing after "
                f"{outcome.seconds:.1f} s: {reasons}"
            )
        return [outcome.finished[item.id] for item in items]

    async def _finish(
        self,
        artifact_id: str,
        version: int,
        calibration: Calibration | None,
        results: Sequence[PartDone],
    ) -> ArtifactRef:
        """Join the parts: the manifest is stored last."""
        layers = {name: scheme for done in results for name, scheme in done.used.items()}
        compared = sum(done.codes_compared for done in results)
        changed = sum(done.codes_changed for done in results)
        self.last_flips = changed / compared if compared else None
        manifest = assemble_manifest(
            policy_version=version,
            model=results[0].model,
            layers=layers,
            specs={name: spec for done in results for name, spec in done.specs.items()},
            asked={name: scheme for done in results for name, scheme in done.asked.items()},
            notes={name: note for done in results for name, note in done.notes.items()},
            calibration=record_of(calibration, layers),
            weight_error={n: error for done in results for n, error in done.weight_error.items()},
            artifact_id=artifact_id,
        )
        return await store.finish_artifact(manifest, [done.part for done in results])


async def _forget(artifact_id: str) -> None:
    """Delete the parts of an artifact that will not come about; whoever publishes next deletes
    what a straggler still adds."""
    try:
        await store.drop_artifact(artifact_id)
    except store.StoreError as error:
        log.warning("parts of %s stay in the store: %s", artifact_id, error)
