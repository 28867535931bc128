"""When scales are made anew: first, by period, on drift, and when the first ones were rushed."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_ptq.artifact import Manifest, TensorSpec
from forge_ptq.config import PTQConfig
from forge_ptq.numerics.calibration import Calibration
from forge_ptq.numerics.drift import Drift
from forge_ptq.numerics.stats import measure
from forge_ptq.services.candidate import flop_share
from forge_ptq.services.replicas import PublishError
from forge_ptq.services.sampler import RolloutSampler
from forge_ptq.services.schedule import Due, NotYetError, Schedule

LAYERS = {
    "l.q_proj": "int8_static", "l.k_proj": "int8_static", "l.v_proj": "int8_static",
    "l.o_proj": "int8_dynamic", "l.down_proj": "bf16",
}  # fmt: skip
CALM = Drift(0.0, 0.01, 1.0)


def episodes(count: int, version: int = 0) -> list[Any]:
    """One group each, so that they spread over the sides."""
    return [
        SimpleNamespace(
            completion=SimpleNamespace(prompt_ids=[i, 7], token_ids=[1, 2], generator_version=0),
            reward=1.0,
            policy_version=version,
        )
        for i in range(count)
    ]


def schedule(offered: int = 200, **settings: Any) -> Schedule:
    cfg = PTQConfig()
    cfg.plan.default, cfg.calibrate_every = "int8_static", 10
    cfg.calibration.rollouts, cfg.plan.rollouts = 40, 12
    for key, value in settings.items():
        block, _, name = key.partition("__")
        setattr(getattr(cfg, block) if name else cfg, name or block, value)
    auto = cfg.plan.mode == "auto"
    sampler = RolloutSampler(400, probe_fraction=0.3, plan_fraction=0.3 if auto else 0.0)
    sampler.offer(episodes(offered))
    return Schedule(cfg, sampler)


def live(round_: int = 1, version: int = 1) -> Calibration:
    return Calibration(round_, version, LAYERS, {})


def reason(plan: Schedule, version: int, calibration: Calibration | None) -> str | None:
    due = plan.due(version, calibration)
    return due.reason if due else None


def first(plan: Schedule) -> Due:
    due = plan.due(1, None)
    assert due is not None
    return due


def test_the_probes_limit_is_not_the_calibrations() -> None:
    plan = schedule(plan__mode="auto", probe__max_tokens=3)  # all rollouts have four
    due = first(plan)
    assert (len(due.rollouts), len(due.plan_rollouts)) == (40, 12)


def test_first_then_by_trainer_steps_whatever_was_published() -> None:
    plan = schedule()
    due = plan.due(3, None)
    assert due is not None
    assert (due.reason, len(due.rollouts), due.plan_rollouts) == ("first", 40, [])
    plan.calibrated(live(1, 3), due)
    assert [reason(plan, v, live(1, 3)) for v in (4, 12, 13, 40)] == [
        None,
        None,
        "period",
        "period",
    ]


def test_a_plan_that_needs_no_scales_is_never_calibrated() -> None:
    for settings in (
        {"plan__default": "int8_dynamic", "smoothing__enabled": False},
        {"plan__default": "bf16"},
    ):
        assert reason(schedule(**settings), 1, None) is None


def test_auto_draws_two_sets_that_do_not_overlap() -> None:
    plan = schedule(offered=400, plan__mode="auto")
    due = plan.due(1, None)
    assert due is not None
    assert (len(due.rollouts), len(due.plan_rollouts)) == (40, 12)
    assert not {r.group for r in due.rollouts} & {r.group for r in due.plan_rollouts}


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"offered": 6}, r"not enough calibration rollouts: have \d, need 10"),
        ({"offered": 200, "plan__mode": "auto", "plan__rollouts": 400}, "not enough plan rollouts"),
    ],
)
def test_too_few_rollouts_are_an_error_only_while_there_are_no_scales(settings, match) -> None:
    plan = schedule(**settings)
    with pytest.raises(PublishError, match=match):
        plan.due(1, None)
    assert plan.due(100, live()) is None


def test_scales_made_on_few_rollouts_are_made_again_once_there_are_all() -> None:
    plan = schedule(offered=30)
    due = plan.due(1, None)
    assert due is not None
    assert 10 <= len(due.rollouts) < 40
    plan.calibrated(live(), due)
    assert reason(plan, 2, live()) is None
    plan.sampler.offer(episodes(200, version=1))
    again = plan.due(3, live())
    assert again is not None
    assert (again.reason, len(again.rollouts)) == ("more rollouts", 40)
    plan.calibrated(live(2, 3), again)
    assert reason(plan, 4, live(2, 3)) is None


def test_a_short_pool_that_has_doubled_is_worth_another_calibration() -> None:
    plan = schedule(offered=20)
    due = plan.due(1, None)
    assert due is not None
    had = len(due.rollouts)
    assert had < 20
    plan.calibrated(live(), due)
    offered = 20
    while (again := plan.due(2, live())) is None:
        assert len(plan.sampler.calibration(40)) < 2 * had
        plan.sampler.offer(episodes(offered + 1, version=1)[offered:])
        offered += 1
    assert 2 * had == len(again.rollouts) < 40
    plan.calibrated(live(2), again)
    assert plan.due(3, live(2)) is None


@pytest.mark.parametrize(
    "drift", [Drift(0.02, 0.01, 1.0), Drift(0.0, 0.5, 1.0), Drift(0.0, 0.01, 9.0)]
)
def test_drift_of_a_static_layer_calibrates_early(drift: Drift) -> None:
    plan = schedule()
    plan.calibrated(live(), first(plan))
    report = plan.watch({"l.q_proj": drift, "l.o_proj": CALM}, live())
    assert report is not None
    assert report.layer == "l.q_proj"
    assert report.exceeded
    assert "l.q_proj" in report.exceeded
    # Not at once: a threshold that noise passes must not make every publish a calibration.
    assert [reason(plan, v, live()) for v in (2, 5)] == [None, None]
    assert reason(plan, 6, live()) == f"drift: {report.exceeded}"
    assert reason(schedule(drift__enabled=False), 6, live()) is None


def test_drift_that_passes_is_forgotten() -> None:
    plan = schedule()
    plan.watch({"l.q_proj": Drift(0.02, 0.01, 1.0)}, live())
    plan.watch({"l.q_proj": CALM}, live())
    assert reason(plan, 8, live()) is None
    plan.watch({"l.q_proj": Drift(0.02, 0.01, 1.0)}, live())
    due = plan.due(8, live())
    assert due is not None
    plan.calibrated(live(2, 8), due)
    assert reason(plan, 15, live(2, 8)) is None


def test_what_a_range_was_chosen_to_cut_off_is_no_drift() -> None:
    x_TC = torch.ones(100, 10)
    x_TC[0] = 8.0  # one in a hundred, which a range of 2 clips
    scales = replace(live(), stats={"l.q_proj": measure(x_TC)}, absmax={"l.q_proj": 2.0})
    plan = schedule()
    for clipped, passed in ((0.0115, False), (0.0125, True)):
        report = plan.watch({"l.q_proj": Drift(clipped, 0.0, 1.0)}, scales)
        assert report is not None
        assert report.clipped_fraction == clipped
        assert (report.exceeded is not None) is passed


def test_a_refused_candidate_is_a_reason_too_after_a_while() -> None:
    plan = schedule(drift__enabled=False)
    plan.refused()
    assert [reason(plan, v, live()) for v in (2, 5, 6)] == [None, None, "refused"]
    plan.calibrated(live(2, 6), first(plan))
    assert reason(plan, 12, live(2, 6)) is None


def test_only_static_layers_count() -> None:
    plan = schedule()
    wild = {"l.o_proj": Drift(0.5, 0.9, 99.0), "l.down_proj": Drift(0.5, 0.9, 99.0)}
    assert plan.watch(wild, live()) is None
    report = plan.watch({**wild, "l.q_proj": Drift(0.0005, 0.02, 1.5)}, live())
    assert report is not None
    numbers = (report.clipped_fraction, report.js_distance, report.absmax_ratio)
    assert numbers == (0.0005, 0.02, 1.5)
    assert report.exceeded is None
    assert plan.watch({"l.q_proj": CALM}, None) is None


def test_flop_share_goes_by_elements_of_the_weights() -> None:
    def spec(*shape: int) -> TensorSpec:
        return TensorSpec(shape, "int8", "")

    manifest = Manifest(
        artifact_id="a", policy_version=1, model="toy",
        layers={"a": "int8_static", "b": "bf16", "c": "int8_static"},
        tensors={
            "a.weight": spec(4, 10), "a.weight_scale": spec(4, 1), "b.weight": spec(5, 10),
            "c.weight": spec(1, 10), "lm_head.weight": spec(1000, 10),
        },
    )  # fmt: skip
    assert flop_share(manifest) == {"bf16": 0.5, "int8_static": 0.5}


def test_a_calibration_that_fails_waits_twice_as_long_each_time_and_not_for_ever():
    plan = schedule()
    tried = []
    for publish in range(1, 130):
        try:
            if plan.due(publish, None) is not None:
                tried.append(publish)
                plan.failed()
        except NotYetError as error:
            assert f"failed {len(tried)} times" in str(error)  # noqa: PT017
    assert tried == [1, 2, 4, 8, 16, 32, 64, 96, 128]
    due = None
    while due is None:  # the wait that was left
        due = plan.due(200, live())
    plan.calibrated(live(1, 200), due)
    assert reason(plan, 210, live(1, 200)) == "period", "a success forgets the failures"
    plan.failed()
    assert reason(plan, 211, live(1, 200)) == "period"


def test_while_it_waits_the_scales_at_hand_go_on():
    plan = schedule()
    for _ in range(2):
        assert reason(plan, 20, live(1, 1)) == "period"
        plan.failed()
    assert [reason(plan, 21 + i, live(1, 1)) for i in range(3)] == [None, "period", "period"]


def restarted(plan: Schedule, offered: int = 200) -> Schedule:
    other = schedule(offered=offered)
    other.restore(json.loads(json.dumps(plan.state())))
    return other


def test_a_new_session_knows_why_the_scales_are_to_be_made_anew() -> None:
    plan = schedule()
    plan.calibrated(live(), first(plan))
    assert reason(restarted(plan), 9, live()) is None
    plan.refused()
    assert reason(restarted(plan), 9, live()) == "refused"
    plan.watch({"l.q_proj": Drift(0.9, 0.9, 9.0)}, live())
    assert (reason(restarted(plan), 9, live()) or "").startswith("drift: l.q_proj")
    short = schedule(offered=40)
    short.calibrated(live(), first(short))
    assert reason(restarted(short), 2, live()) == "more rollouts"
    assert reason(restarted(short), 2, live(round_=2)) is None, "it was of another calibration"


@pytest.mark.parametrize(
    "state", [{}, {"drifted": None, "refused": False, "short": 3}, {"short": []}]
)
def test_a_stored_state_that_is_none_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="schedule"):
        schedule().restore(state)
