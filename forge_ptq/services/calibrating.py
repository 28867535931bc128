"""One calibration round, from rollouts to a stored Calibration; see fleet.py for its course."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from forge_ptq import runtime, store_stats
from forge_ptq.numerics.calibration import Calibration
from forge_ptq.numerics.stats_table import Layout
from forge_ptq.services.crew import FleetError
from forge_ptq.services.policy_batches import make_batches, shortened
from forge_ptq.services.replicas import PublishError, call_one
from forge_ptq.services.round import Item, Outcome
from forge_ptq.services.sampler import Rollout
from forge_ptq.services.work import Observe, Plan, PlanDone, ShareDone, Smooth, SmoothDone
from forge_ptq.store_io import StoreError
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
    """The batches dealt round like cards."""
    return [list(batches[first::shares]) for first in range(shares)]


def primaries(replicas: int, oversample: float) -> int:
    """Shares for so many replicas, the others standing by."""
    return max(1, int(replicas / oversample))


def asked_plan(plan: Any) -> dict[str, Any]:
    """What of a PlanConfig the schemes of a calibration depend on, as JSON."""
    overrides = dict(plan.overrides)
    if plan.mode == "auto":
        return {"mode": "auto", "overrides": overrides, "budget": plan.budget}
    return {"mode": plan.mode, "overrides": overrides, "default": plan.default}


def misfit(found: Calibration, layout: Layout, layers: Collection[str], plan: Any) -> str | None:
    """Why a stored calibration cannot be used for a model and a PlanConfig; None if it can."""
    if set(found.layers) != set(layers):
        odd = sorted(set(found.layers) ^ set(layers))[0]
        return f"its layers are not the model's ({odd})"
    if found.stats and Layout.of(found.stats) != layout:
        return "its inputs are not as wide as the model's"
    if dict(found.asked) != (now := asked_plan(plan)):
        return f"it was made for the plan {dict(found.asked)}, now it is {now}"
    return None


async def run_calibration(
    fleet: QuantizerFleet,
    version: int,
    rollouts: Sequence[Rollout],
    plan_rollouts: Sequence[Rollout],
) -> Calibration:
    """See ``QuantizerFleet.calibrate``. Whatever goes wrong is a CalibrationError."""
    batches = make_batches(rollouts, fleet.cfg.calibration.batch_tokens)
    if not any(rollout.token_ids for rollout in rollouts):
        raise CalibrationError("calibration: there are no rollouts")
    try:
        round_ = await store_stats.claim_round()
        try:
            calibration = await _run(fleet, round_, version, batches, plan_rollouts)
            await store_stats.put_calibration(calibration)
        finally:
            await _tidy(store_stats.drop_rounds(round_, fleet.cfg.calibration.keep_versions))
    except CalibrationError:
        raise
    except (FleetError, StoreError, ValueError) as error:  # ValueError: a range is not finite
        raise CalibrationError(f"calibration: {error}") from error
    return calibration


async def _tidy(work: Awaitable[Any]) -> None:
    """Delete what is not needed any more. The next calibration deletes what now stays."""
    try:
        await work
    except StoreError as error:
        log.warning("statistics stay in the store: %s", error)


async def _run(
    fleet: QuantizerFleet,
    round_: int,
    version: int,
    batches: Sequence[Sequence[Rollout]],
    plan_rollouts: Sequence[Rollout],
) -> Calibration:
    """All passes and the plan; nothing is stored but statistics."""
    cfg = fleet.cfg
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
    return Calibration(
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
        range_method=cfg.calibration.range,
        budget=cfg.plan.budget if auto else None,
        asked=asked_plan(cfg.plan),
    )


async def _one(fleet: QuantizerFleet, kind: str, work: Any) -> Any:
    """The result of a round of a single item."""
    return (await fleet.complete(kind, [Item(kind, work)], fleet.cfg.merge.deadline_s))[0]


async def _pass(
    fleet: QuantizerFleet,
    round_: int,
    pass_: int,
    version: int,
    batches: Sequence[Sequence[Rollout]],
    shift: Mapping[str, torch.Tensor],
    account: _Account,
) -> int:
    """Observe and merge; returns the tokens that went in. CalibrationError below the quorum.

    Shares are deleted at the end, whatever it is: merged they are not needed, and a round that
    failed is not continued.
    """
    try:
        return await _observe_and_merge(fleet, round_, pass_, version, batches, shift, account)
    finally:
        await _tidy(store_stats.drop_shares(round_, pass_))


async def _observe_and_merge(
    fleet: QuantizerFleet,
    round_: int,
    pass_: int,
    version: int,
    batches: Sequence[Sequence[Rollout]],
    shift: Mapping[str, torch.Tensor],
    account: _Account,
) -> int:
    """See ``_pass``."""
    cfg = fleet.cfg
    # An empty share would count towards the quorum and hold nothing.
    count = min(primaries(await fleet.crew.size(), cfg.calibration.oversample), len(batches))
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
        if isinstance(error, PublishError | TimeoutError):
            log.error("the merger does not answer: killing its processes on this host")
            await runtime.kill_local(fleet.merger)
        raise CalibrationError(f"calibration: merging failed: {error}") from error
    account.enter(outcome, left_out, pass_)
    _check_quorum(outcome, left_out, count, cfg.merge.quorum)
    tokens = sum(share.tokens for item, share in done.items() if item not in left_out)
    if not tokens:
        raise CalibrationError("calibration: the shares hold no token")
    return tokens


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
