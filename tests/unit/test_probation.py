"""The watch over what serves, against sums made by hand."""

import json
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from forge_ptq.config.guard import ProbationConfig
from forge_ptq.mismatch import SequenceMismatch
from forge_ptq.services.probation import CONTROL_EPISODES, Probation


def record(
    artifact_id: str = "a1",
    k3: float = 0.01,
    ess: float = 0.9,
    tokens: int = 10,
    age: int = 1,
    scheme: str = "int8_static",
    rejected: int = 0,
    sampled_finite: bool = True,
    left_out: int = 0,
) -> SequenceMismatch:
    """A sequence whose tokens have this mean k3 and this effective share (mean ratio 1)."""
    return SequenceMismatch(
        artifact_id=artifact_id,
        scheme=scheme,
        policy_version=1,
        age=age,
        tokens=tokens,
        k1_sum=0.0,
        k3_sum=k3 * tokens,
        ratio_sum=float(tokens),
        ratio_sq_sum=tokens / ess,
        max_abs_gap=1.0,
        reward=0.0,
        group="g",
        rejected=rejected,
        sampled_finite=sampled_finite,
        left_out=left_out,
    )


def probation(**settings: Any) -> Probation:
    limits = {"episodes": 8, "patience": 2, "max_mismatch_kl": 0.1, "max_left_out": 0.2}
    cfg = ProbationConfig(**(limits | settings))
    made = Probation(cfg)
    made.serves("a1", "p")
    made.serves("a2", "p")
    made.serves("b1", "q")
    return made


def fed(made: Probation, *records: SequenceMismatch) -> list[Any]:
    found = []
    for each in records:
        made.add(each)
        found += made.judge()
    return found


def test_no_judgement_before_there_are_enough_and_then_one():
    made = probation()
    assert fed(made, *[record()] * 7) == []
    (judgement,) = fed(made, record())
    assert (judgement.plan, judgement.over, judgement.failed) == ("p", "", False)
    assert judgement.good == ("a1",)
    numbers = judgement.numbers
    assert numbers["mismatch_k3"] == pytest.approx(0.01)
    assert numbers["ess"] == pytest.approx(0.9)
    assert (numbers["episodes"], numbers["tokens"]) == (8, 80)
    assert fed(made, *[record()] * 7) == []


def test_it_takes_as_many_bad_judgements_in_a_row_as_patience_says():
    made = probation()
    bad, good = [record(k3=0.2)] * 8, [record()] * 8
    first, second, third, fourth = fed(made, *bad, *good, *bad, *bad)
    assert [j.failed for j in (first, second, third, fourth)] == [False, False, False, True]
    assert [j.numbers["strikes"] for j in (first, second, third, fourth)] == [1, 0, 1, 2]
    assert "mismatch 0.2 nats per token" in fourth.over
    assert "limit 0.1" in fourth.over
    assert [j.failed for j in fed(made, *bad)] == [False], "and then it starts anew"


def test_off_it_measures_and_never_fails():
    made = probation(enabled=False)
    judgements = fed(made, *[record(k3=0.5)] * 40)
    assert len(judgements) == 5
    assert all(j.over and not j.failed for j in judgements)


def test_means_are_over_tokens_not_over_sequences():
    made = probation()
    records = [record(k3=0.3, tokens=10)] * 4 + [record(k3=0.0, tokens=90)] * 4
    (judgement,) = fed(made, *records)
    assert judgement.numbers["mismatch_k3"] == pytest.approx(0.03)
    assert not judgement.over


def test_episodes_of_one_plan_are_judged_together_and_each_artifact_by_itself():
    made = probation(patience=1)
    made.serves("a3", "p")
    records = [record("a1", k3=0.3)] * 4 + [record("a2", k3=0.01)] * 3 + [record("a3", k3=0.02)]
    (judgement,) = fed(made, record("b1"), *records)
    assert judgement.plan == "p"
    assert judgement.failed
    assert judgement.numbers["mismatch_k3"] == pytest.approx((1.2 + 0.03 + 0.02) / 8)
    assert judgement.bad == ("a1",)
    assert judgement.good == ("a2",), "one sequence of eight is not enough for a3"


def test_a_good_judgement_does_not_clear_the_one_that_is_bad_by_itself():
    made = probation()
    (judgement,) = fed(made, *[record("a1")] * 7, record("a2", k3=0.5))
    assert not judgement.over
    assert judgement.good == ("a1",)


def test_the_accused_are_those_of_all_bad_judgements_in_a_row():
    made = probation()
    _, second = fed(made, *[record("a1", k3=0.3)] * 8, *[record("a2", k3=0.3)] * 8)
    assert second.failed
    assert second.bad == ("a1", "a2")


def test_unknown_artifacts_and_forgotten_plans_do_not_count():
    made = probation()
    assert fed(made, *[record("stray", k3=9.0)] * 50) == []
    assert fed(made, *[record(k3=9.0)] * 7) == []
    made.forget("p")
    assert fed(made, *[record()] * 7) == []


@pytest.mark.parametrize("age", [0, 1, 5])
def test_full_precision_at_the_same_age_is_subtracted(age):
    made = probation()
    control = [record(k3=0.15, scheme="bf16", age=age, artifact_id="x")] * CONTROL_EPISODES
    fed(made, *control)
    (judgement,) = fed(made, *[record(k3=0.2, age=age)] * 8)
    assert judgement.over == ""
    assert judgement.numbers["control_k3"] == pytest.approx(0.15)
    (judgement,) = fed(made, *[record(k3=0.2, age=age + 1)] * 8)
    assert "mismatch" in judgement.over, "another age says nothing about this one"


def test_control_is_weighted_by_the_ages_that_are_judged():
    made = probation()
    fed(made, *[record(k3=0.1, scheme="bf16", age=1, tokens=3)] * CONTROL_EPISODES)
    fed(made, *[record(k3=0.4, scheme="bf16", age=2, tokens=50)] * CONTROL_EPISODES)
    records = [record(age=1, tokens=30)] * 4 + [record(age=2, tokens=10)] * 4
    (judgement,) = fed(made, *records)
    assert judgement.numbers["control_k3"] == pytest.approx((0.1 * 120 + 0.4 * 40) / 160)


def test_a_few_sequences_are_no_control():
    made = probation()
    fed(made, *[record(k3=0.15, scheme="bf16")] * (CONTROL_EPISODES - 1))
    (judgement,) = fed(made, *[record(k3=0.2)] * 8)
    assert judgement.numbers["control_k3"] == 0
    assert judgement.over


def test_effective_sample_size_alone_and_against_full_precision():
    made = probation()
    (judgement,) = fed(made, *[record(ess=0.4)] * 8)
    assert judgement.over.startswith("effective sample size 40.00%")
    fed(made, *[record(ess=0.6, scheme="bf16")] * CONTROL_EPISODES)
    (judgement,) = fed(made, *[record(ess=0.4)] * 8)  # 0.4 / 0.6 > 0.5
    assert judgement.over == ""
    (judgement,) = fed(made, *[record(ess=0.29)] * 8)
    assert "effective" in judgement.over


@pytest.mark.parametrize(
    "broken",
    [
        record(rejected=3, sampled_finite=False),
        record(tokens=0, ess=1.0, rejected=4, sampled_finite=False),
        record(k3=math.nan, sampled_finite=False),
        record(k3=math.inf, sampled_finite=False),
    ],
)
def test_what_is_not_finite_is_over_and_poisons_nothing(broken):
    made = probation()
    first, second = fed(made, broken, *[record()] * 15)
    assert "not finite" in first.over
    assert second.over == ""
    json.dumps(made.state(), allow_nan=False)


@pytest.mark.parametrize(
    "broken", [record(rejected=3), record(tokens=0, ess=1.0, rejected=4), record(k3=math.nan)]
)
def test_what_the_trainer_alone_cannot_score_is_no_evidence(broken):
    made = probation()
    assert fed(made, *[broken] * 50) == [], "neither against what sampled it nor for it"
    (judgement,) = fed(made, *[record()] * 8)
    assert judgement.numbers["episodes"] == 8


def test_an_artifact_is_confirmed_by_enough_sequences_of_its_own():
    made = probation()
    first, second = fed(made, *[record("a1")] * 7, record("a2"), *[record("a1")] * 7, record("a2"))
    assert (first.good, second.good) == (("a1",), ("a1", "a2")), "a quarter, over two judgements"
    *_, third = fed(
        made, *[record("a2", k3=0.3)] * 2, *[record("a1")] * 6, *[record("a1")] * 7, record("a2")
    )
    assert third.good == ("a1",), "what was bad meanwhile starts anew"


def test_the_control_forgets():
    made = probation()
    fed(made, *[record(k3=1.0, scheme="bf16")] * 40)
    fed(made, *[record(k3=0.0, scheme="bf16")] * 400)
    (judgement,) = fed(made, *[record(k3=0.11)] * 8)
    assert judgement.numbers["control_k3"] < 0.001


@pytest.mark.parametrize("cut", range(0, 33, 4))
def test_state_goes_through_json_at_any_moment(cut):
    records = [record("a1", k3=0.3)] * 5 + [record("a2", k3=0.2, age=2)] * 12
    records += [record(k3=0.05, scheme="bf16", age=2)] * 9 + [record("b1", ess=0.1)] * 8
    whole = fed(probation(), *records)
    first = probation()
    before = fed(first, *records[:cut])
    other = Probation(first.cfg)
    other.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
    assert before + fed(other, *records[cut:]) == whole
    assert len(whole) == 3


@pytest.mark.parametrize("state", [{}, {"schema": 2}, {"schema": 1, "plans": 3}])
def test_a_state_that_is_none_is_refused(state):
    with pytest.raises(ValueError, match="probation: "):
        probation().restore(state)


def test_windows_of_plans_long_gone_are_dropped():
    made = Probation(SimpleNamespace(episodes=8, patience=1, enabled=True))
    for number in range(1000):
        made.serves(f"x{number}", f"plan{number}")
        made.cfg.max_mismatch_kl, made.cfg.min_ess, made.cfg.max_left_out = 1.0, 0.1, 1.0
        fed(made, record(f"x{number}"))
    assert len(made.state()["windows"]) <= 201
    assert len(made.plans) <= 201


def test_one_flagrant_judgement_is_enough():
    made = probation()
    (judgement,) = fed(made, *[record(k3=0.41)] * 8)
    assert (judgement.failed, judgement.bad) == (True, ("a1",))
    assert not fed(probation(), *[record(k3=0.39)] * 8)[0].failed
    assert fed(probation(), *[record(ess=0.12)] * 8)[0].failed
    assert not fed(probation(), *[record(ess=0.13)] * 8)[0].failed


def test_good_siblings_do_not_hide_an_artifact_that_is_bad_by_itself():
    made = probation(patience=1)
    records = [record("a1", k3=0.01)] * 6 + [record("a2", k3=0.3)] * 2
    (judgement,) = fed(made, *records)
    assert judgement.numbers["mismatch_k3"] < 0.1
    assert judgement.failed
    assert "a2 by itself: mismatch 0.3" in judgement.over
    assert judgement.bad == ("a2",)
    few = [record("a1", k3=0.01)] * 7 + [record("a2", k3=0.3)]
    assert not fed(probation(patience=1), *few)[0].failed


def test_data_left_out_fails_a_plan_that_agrees_otherwise():
    """Responses of 4,000 tokens vetoed for one of them: a k3 of 0.002."""
    made = probation()
    vetoed = [record(k3=0.002, tokens=4000, left_out=4000)] * 2 + [record(tokens=4000)] * 6
    first, second = fed(made, *vetoed, *vetoed)
    assert first.numbers["left_out"] == pytest.approx(0.25)
    assert "25.00% of the tokens left out of the loss, 0.00% in full precision" in first.over
    assert (first.failed, second.failed) == (False, True)
    assert second.bad == ("a1",)
    assert not fed(probation(max_left_out=0.26), *vetoed)[0].over
    assert not fed(probation(max_left_out=1.0), *[record(left_out=10)] * 8)[0].over


def test_with_a_quarter_of_what_must_be_kept_no_second_judgement_is_needed():
    assert fed(probation(), *[record(left_out=9)] * 8)[0].failed
    assert not fed(probation(), *[record(left_out=7)] * 8)[0].failed
    assert fed(probation(max_left_out=0.5), *[record(left_out=9)] * 8)[0].failed


def test_the_share_left_out_is_of_what_full_precision_keeps_at_that_age():
    made = probation(max_left_out=0.4)
    fed(made, *[record("other", scheme="bf16", left_out=5)] * CONTROL_EPISODES)
    (judgement,) = fed(made, *[record(left_out=7)] * 8)
    assert judgement.numbers["control_left_out"] == pytest.approx(0.5)
    assert not judgement.over, "0.3 of 0.5 are kept, 60 %"
    (judgement,) = fed(made, *[record(left_out=8)] * 8)
    assert "80.00% of the tokens left out of the loss, 50.00% in full precision" in judgement.over
    made = probation()
    fed(made, *[record("other", scheme="bf16", left_out=10)] * CONTROL_EPISODES)
    assert not fed(made, *[record(left_out=10)] * 8)[0].over, "full precision keeps nothing either"


def test_few_sequences_dropped_by_chance_accuse_no_artifact():
    """One of two sequences of a2 is vetoed, of all eight that is an eighth."""
    made = probation()
    records = [*[record("a1")] * 6, record("a2"), record("a2", left_out=10)]
    for judgement in fed(made, *records * 4):
        assert (judgement.over, judgement.bad) == ("", ())
        assert judgement.good == ("a1",), "nor is a2 confirmed"
    worse = [*[record("a1")] * 6, *[record("a2", left_out=10)] * 2]
    (judgement,) = fed(probation(patience=1), *worse)
    assert judgement.failed
    assert (judgement.bad, judgement.good) == (("a2",), ("a1",))


def test_one_artifact_without_any_data_needs_a_second_judgement_of_the_plan():
    """A prompt's responses are dropped together, and an artifact may have but a few prompts."""
    made = probation()
    records = [*[record("a1")] * 6, *[record("a2", left_out=10)] * 2]
    first, second = fed(made, *records * 2)
    assert (first.failed, second.failed) == (False, True)


def test_one_artifact_far_over_a_limit_needs_no_second_judgement():
    records = [record("a1", k3=0.01)] * 6 + [record("a2", k3=0.41)] * 2
    assert fed(probation(), *records)[0].failed


@pytest.mark.parametrize("per_version", [16, 32, 64])
@pytest.mark.parametrize(("prompts_of", "share"), [(1, 0.15), (8, 0.05)])
def test_half_the_limit_vetoed_at_random_is_not_taken_back(per_version, prompts_of, share):
    """As shipped, over 20 judgements. Independently, or all responses to a prompt at once: then 64
    are eight prompts, and less is certain."""
    generator = random.Random(per_version)
    made = Probation(ProbationConfig())
    for number in range(1280 // per_version):
        made.serves(f"v{number}", "p")
        for index in range(per_version):
            if index % prompts_of == 0:
                vetoed = generator.random() < share
            made.add(record(f"v{number}", left_out=10 * vetoed))
            assert not any(judgement.failed for judgement in made.judge())


def test_a_state_from_before_shares_were_counted_is_read():
    made = probation()
    fed(made, *[record()] * 3, *[record("other", scheme="bf16")] * 9)
    state = made.state()
    for ages in (*state["windows"]["p"]["artifacts"].values(), state["control"]):
        for sums in ages.values():
            del sums["left_out"]
    other = probation()
    other.restore(state)
    assert other.state() == made.state()
