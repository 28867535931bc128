"""One calibration round, from rollouts to a stored Calibration; see fleet.py for its course."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from forge_ptq import store_stats
from forge_ptq.numerics.calibration import Calibration
from forge_ptq.services.crew import FleetError
from forge_ptq.services.policy_batches import make_batches, shortened
from forge_ptq.services.replicas import call_one
from forge_ptq.services.round import Item, Outcome
from forge_ptq.services.sampler import Rollout
from forge_ptq.services.work import Observe, Plan, PlanDone, ShareDone, Smooth, SmoothDone
from forge_ptq.store_stats import ShareKey

if TYPE_CHECKING:
    from forge_ptq.services.fleet import QuantizerFleet

log = logging.getLogger(__name__)


class CalibrationError(FleetError):
    """A calibration that did not come about; the message says what was missing and why."""


@dataclass
class _Account:
    """Who contributed to a calibration and who dropped out, over its passes."""

    contributors: set[str] = field(default_factory=set)
    dropped: dict[str, None] = field(default_factory=dict)
    """In order, each once."""

    def enter(self, outcome: Outcome, left_out: Mapping[str, str], pass_: int) -> None:
        """After a pass: owners of the shares that went in, everybody else with the reason."""
        for item, owner in outcome.owners.items():
            if item not in left_out:
                self.contributors.add(owner)
        notes = [f"{replica}: {error}" for replica, error in outcome.errors.items()]
        notes += [f"{replica}: lost" for replica in outcome.lost]
        notes += [f"{item} of pass {pass_}: {reason}" for item, reason in outcome.missing.items()]
        notes += [f"{item} of pass {pass_}: left out, {why}" for item, why in left_out.items()]
        self.dropped |= dict.fromkeys(notes)


def deal(batches: Sequence[Any], shares: int) -> list[list[Any]]:
    """The batches dealt round like cards; some shares are empty if there are too few."""
    return [list(batches[first::shares]) for first in range(shares)]


def primaries(replicas: int, oversample: float) -> int:
    """Shares for so many replicas, the others standing by."""
    return max(1, int(replicas / oversample))


async def run_calibration(
    fleet: QuantizerFleet,
    round_: int,
    version: int,
    rollouts: Sequence[Rollout],
    plan_rollouts: Sequence[Rollout],
) -> Calibration:
    """See ``QuantizerFleet.calibrate``."""
    cfg = fleet.cfg
    batches = make_batches(rollouts, cfg.calibration.batch_tokens)
    if not batches:
        raise CalibrationError("calibration: there are no rollouts")
    account = _Account()
    shift: Mapping[str, torch.Tensor] = {}
    alpha: Mapping[str, float] = {}
    last, tokens = 0, 0
    if cfg.smoothing.enabled:
        tokens = await _pass(fleet, round_, 0, version, batches, shift, account)
        smooth = Smooth(version, round_, 0, cfg.smoothing.alpha, cfg.smoothing.down_proj)
        done: SmoothDone = await _one(fleet, "smooth", smooth)
        shift, alpha = done.shift, done.alpha
    if shift or not cfg.smoothing.enabled:
        last = 1
        tokens = await _pass(fleet, round_, 1, version, batches, shift, account)
    before, auto = fleet.calibration, cfg.plan.mode == "auto"
    plan = Plan(
        version=version,
        round=round_,
        pass_=last,
        shift=shift,
        method=cfg.calibration.range,
        percentile=cfg.calibration.percentile,
        auto=auto,
        budget=cfg.plan.budget,
        max_evaluations=cfg.plan.max_evaluations,
        rollouts=shortened(plan_rollouts, cfg.plan.response_tokens) if auto else [],
        start=dict(before.layers) if before is not None else None,
    )
    planned: PlanDone = await _one(fleet, "plan", plan)
    calibration = Calibration(
        round=round_,
        policy_version=version,
        layers=planned.layers,
        absmax=planned.absmax,
        shift=shift,
        stats=await store_stats.get_merged(round_, last),
        tokens=tokens,
        contributors=tuple(sorted(account.contributors)),
        dropped=tuple(account.dropped),
        predicted_rise=planned.predicted_rise,
        alpha=alpha,
    )
    await store_stats.put_calibration(calibration)
    await store_stats.drop_rounds(before=round_ - cfg.calibration.keep_versions + 1)
    return calibration


async def _one(fleet: QuantizerFleet, kind: str, work: Any) -> Any:
    """The result of a round of a single item."""
    try:
        results = await fleet.complete(kind, [Item(kind, work)], fleet.cfg.merge.deadline_s)
    except FleetError as error:
        raise CalibrationError(f"calibration: {error}") from error
    return results[0]


async def _pass(
    fleet: QuantizerFleet,
    round_: int,
    pass_: int,
    version: int,
    batches: Sequence[Sequence[Rollout]],
    shift: Mapping[str, torch.Tensor],
    account: _Account,
) -> int:
    """Observe and merge; returns the tokens that went in. CalibrationError below the quorum."""
    cfg = fleet.cfg
    count = primaries(await fleet.crew.size(), cfg.calibration.oversample)
    items = [
        Item(
            f"share-{share}",
            Observe(
                version=version,
                round=round_,
                pass_=pass_,
                share=share,
                batches=dealt,
                shift=shift,
                checkpoint_every=cfg.calibration.checkpoint_every,
                keep=cfg.calibration.keep_versions,
            ),
        )
        for share, dealt in enumerate(deal(batches, count))
    ]
    report = await fleet.hold(f"observe-{pass_}", items, cfg.merge.deadline_s)
    outcome = report.outcome
    done: dict[str, ShareDone] = outcome.finished
    _check_quorum(outcome, {}, count, cfg.merge.quorum)
    keys: dict[str, ShareKey] = {item: share.key for item, share in done.items()}
    arguments = (round_, pass_, keys, cfg.merge.rule, cfg.merge.sigma_clip)
    try:
        left_out: dict[str, str] = await call_one(
            fleet.merger, "merge", *arguments, deadline_s=cfg.merge.deadline_s
        )
    except Exception as error:
        raise CalibrationError(f"calibration: merging failed: {error}") from error
    account.enter(outcome, left_out, pass_)
    _check_quorum(outcome, left_out, count, cfg.merge.quorum)
    return sum(share.tokens for item, share in done.items() if item not in left_out)


def _check_quorum(outcome: Outcome, left_out: Mapping[str, str], count: int, quorum: float) -> None:
    """CalibrationError if too few of the shares are there."""
    good = len(outcome.finished) - len(left_out)
    if good >= quorum * count and good > 0:
        return
    reasons = [f"{item} {reason}" for item, reason in outcome.missing.items()]
    reasons += [f"{item} was left out ({reason})" for item, reason in left_out.items()]
    raise CalibrationError(
        f"calibration: {good} of {count} shares, the quorum is {quorum:.0%}: {'; '.join(reasons)}"
    )
