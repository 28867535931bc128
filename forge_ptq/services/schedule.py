"""When scales are made anew, and on which rollouts. Between calibrations scales stay frozen, so
that an unchanged weight keeps its int8 code.

    due(version, live)       why to calibrate now and on what, or None:
        first                there is no calibration yet
        period               calibrate_every trainer steps have passed since the last one
        drift                a static layer's input had moved too far at the last publish
        refused              the gate refused the last candidate made with these scales
        more rollouts        the last one was made while the pool was short, and now it is full or
                             twice what it was
    calibrated(live, due)    it was made
    failed()                 it was tried and did not come about
    watch(drifts, live)      what the last reference forward says about the live scales
    refused()                what the gate said
    state(), restore(state)  what is remembered between publishes

The age of a calibration is a difference of policy versions, which count trainer steps.

One that failed is tried again at the next publish, then after 2, 4, ... publishes. Meanwhile the
scales there are go on, under the gate's eyes; without any, versions are served in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forge_ptq.config.calibration import LEAST_SHARE
from forge_ptq.numerics.calibration import Calibration
from forge_ptq.numerics.drift import Drift, Thresholds, clipped_fraction, exceeded, worst
from forge_ptq.numerics.plan import group_of
from forge_ptq.services.replicas import PublishError
from forge_ptq.services.sampler import Rollout, RolloutSampler

LONGEST_WAIT = 32
"""Most publishes from one failed calibration to the next attempt."""
MORE_ROLLOUTS = "more rollouts"
GROWTH = 2.0
"""Rollouts at hand over those of a calibration on a short pool, for another one to be worth it."""


class NotYetError(PublishError):
    """There is no calibration, and the next attempt at one is put off."""


@dataclass(frozen=True)
class Due:
    """A calibration to be made."""

    reason: str
    rollouts: list[Rollout]
    """To measure the inputs on."""
    plan_rollouts: list[Rollout]
    """To measure plans on; empty for a fixed plan."""


@dataclass(frozen=True)
class DriftReport:
    """The static layers' inputs against the statistics behind the live scales, worst of all."""

    clipped_fraction: float
    js_distance: float
    absmax_ratio: float
    layer: str
    """Where the clipped fraction is largest; among equals, where the absmax ratio is."""
    exceeded: str | None
    """The threshold passed, with layer and numbers; None while all is well."""


class Schedule:
    """See the module's docstring. cfg: config.PTQConfig."""

    def __init__(self, cfg: Any, sampler: RolloutSampler) -> None:
        self.cfg = cfg
        self.sampler = sampler
        self.needed: bool = cfg.needs_calibration()
        self._auto = cfg.plan.mode == "auto"
        self._drifted: str | None = None
        self._refused = False
        self._failures = 0
        """Calibrations that failed since the last one that did not."""
        self._wait = 0
        """Publishes to let pass before the next attempt."""
        self._short: tuple[int, float] | None = None
        """(round, share of the rollouts wanted that it had) of a calibration on a short pool."""

    def due(self, version: int, live: Calibration | None) -> Due | None:
        """The calibration to make before version is quantized, or None.

        Call once per publish. PublishError if there is none yet and too few rollouts for one,
        NotYetError if it failed too often. A later one that lacks rollouts waits for them: the
        scales there are go on.
        """
        reason = self._reason(version, live)
        if reason is None:
            return None
        if self._wait:
            self._wait -= 1
            if live is not None:
                return None
            raise NotYetError(
                f"calibration failed {self._failures} times in a row, it is tried again after "
                f"{self._wait} more publishes"
            )
        rollouts = self.sampler.calibration(self.cfg.calibration.rollouts)
        plan = self.sampler.plan(self.cfg.plan.rollouts) if self._auto else []
        parts = [("calibration", rollouts, self.cfg.calibration.rollouts)]
        if self._auto:
            parts.append(("plan", plan, self.cfg.plan.rollouts))
        short = [(name, len(have), want) for name, have, want in parts if len(have) < want]
        if reason == MORE_ROLLOUTS and self._short is not None:
            enough = min(1.0, GROWTH * self._short[1])
            if self._share(rollouts, plan) < enough:
                return None
        for name, have, want in short:
            if have < (need := math.ceil(LEAST_SHARE * want)):
                if live is not None:
                    return None
                raise PublishError(f"not enough {name} rollouts: have {have}, need {need}")
        return Due(reason, rollouts, plan)

    def _reason(self, version: int, live: Calibration | None) -> str | None:
        if not self.needed:
            return None
        if live is None:
            return "first"
        age = version - live.policy_version
        if age >= self.cfg.calibrate_every:
            return "period"
        settled = age >= self.cfg.drift.min_steps
        if self._drifted and self.cfg.drift.enabled and settled:
            return f"drift: {self._drifted}"
        if self._refused and settled:
            return "refused"
        made_short = self._short is not None and self._short[0] == live.round
        return MORE_ROLLOUTS if made_short else None

    def calibrated(self, live: Calibration, due: Due) -> None:
        """The calibration that was due was made."""
        self._drifted, self._refused = None, False
        self._failures = 0
        share = self._share(due.rollouts, due.plan_rollouts)
        self._short = (live.round, share) if share < 1 else None

    def _share(self, rollouts: list[Rollout], plan: list[Rollout]) -> float:
        """The smaller of the shares that are at hand of what calibration and plan want."""
        share = len(rollouts) / self.cfg.calibration.rollouts
        return min(share, len(plan) / self.cfg.plan.rollouts) if self._auto else share

    def failed(self) -> None:
        """The calibration that was due did not come about."""
        self._failures += 1
        self._wait = min(2 ** (self._failures - 1), LONGEST_WAIT) - 1

    def refused(self) -> None:
        """A candidate made with the live scales did not pass the gate."""
        self._refused = True

    def state(self) -> dict[str, Any]:
        """What it knows of the live scales, as JSON. Failures are forgotten: a new session may have
        mended what they came from."""
        return {
            "drifted": self._drifted,
            "refused": self._refused,
            "short": None if self._short is None else list(self._short),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``; ValueError for anything else."""
        try:
            drifted, short = state["drifted"], state["short"]
            self._drifted = None if drifted is None else str(drifted)
            self._refused = bool(state["refused"])
            self._short = None if short is None else (int(short[0]), float(short[1]))
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"schedule: not a stored state: {error!r}") from error

    def watch(self, drifts: Mapping[str, Drift], live: Calibration | None) -> DriftReport | None:
        """Take in what was measured; None where there is nothing to compare."""
        if live is None:
            return None
        static = {
            site: drift
            for site, drift in drifts.items()
            if any(live.layers.get(member) == "int8_static" for member in group_of(site))
        }
        if not static:
            return None
        limits = self.cfg.drift
        thresholds = Thresholds(
            limits.max_clipped_fraction, limits.max_js_distance, limits.max_absmax_ratio
        )
        self._drifted = exceeded(
            {site: _beyond_design(site, drift, live) for site, drift in static.items()}, thresholds
        )
        of_all = worst(static)
        most = max(static, key=lambda s: (static[s].clipped_fraction, static[s].absmax_ratio))
        return DriftReport(
            clipped_fraction=of_all.clipped_fraction,
            js_distance=of_all.js_distance,
            absmax_ratio=of_all.absmax_ratio,
            layer=most,
            exceeded=self._drifted,
        )


def _beyond_design(site: str, drift: Drift, live: Calibration) -> Drift:
    """Without the share that the range cut off when it was chosen (percentile, mse and kl do)."""
    if site not in live.stats:
        return drift
    meant = clipped_fraction(live.stats[site], live.absmax.get(site, 0.0))
    return replace(drift, clipped_fraction=max(0.0, drift.clipped_fraction - meant))
