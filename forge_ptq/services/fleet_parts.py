"""What a fleet cuts its work into, and what it joins of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forge_ptq.manifest import CalibrationRecord
from forge_ptq.numerics.calibration import Calibration
from forge_ptq.services.sampler import Rollout
from forge_ptq.services.work import ReferenceDone


def record_of(
    calibration: Calibration | None, layers: Mapping[str, str]
) -> CalibrationRecord | None:
    """What the manifest says about the calibration; None if nothing came from it."""
    if calibration is None:
        return None
    if "int8_static" not in layers.values() and not calibration.shift:
        return None
    return CalibrationRecord.of(calibration)


def chunks(rollouts: Sequence[Rollout], count: int) -> list[list[Rollout]]:
    """At most count consecutive pieces of about equal numbers of tokens, none empty."""
    total = sum(len(rollout.token_ids) for rollout in rollouts)
    pieces: list[list[Rollout]] = [[]]
    done = 0
    for rollout in rollouts:
        if pieces[-1] and done * count >= total * len(pieces):
            pieces.append([])
        pieces[-1].append(rollout)
        done += len(rollout.token_ids)
    return pieces


def drift_of(results: Sequence[ReferenceDone], live: Calibration) -> dict[str, Any]:
    """Site -> Drift of the inputs just seen against those of the calibration."""
    from forge_ptq.numerics.drift import drift
    from forge_ptq.numerics.stats_table import Layout, unpack

    seen: dict[str, Any] = {}
    for result in results:
        if result.stats is None:
            continue
        for site, stats in unpack(result.stats, Layout(result.sites)).items():
            seen[site] = seen[site].merge(stats) if site in seen else stats
    return {
        site: drift(stats, live.stats[site], live.absmax.get(site, 0.0))
        for site, stats in seen.items()
    }
