"""The guard's gates, in order, and the verdict's JSON form."""

import json
import math
from dataclasses import replace

import pytest

from forge_ptq.config import PTQConfig
from forge_ptq.numerics.clusters import ClusterMean, t_quantile
from forge_ptq.numerics.divergence import Divergence
from forge_ptq.services.guard import Decision, Evidence, Limits, StagedSlot, decide, looks
from forge_ptq.services.verdict import Verdict

LAYERS = {"a.q_proj": "int8_dynamic", "a.down_proj": "bf16"}


def measured(rise: float = 0.01, half: float = 0.005, **changes) -> Divergence:
    """Scores of 20 rollouts whose log-rise has a 95 % interval of about this half width."""
    log_rise = math.log1p(rise) if math.isfinite(rise) else rise
    scores = Divergence(
        perplexity_rise=rise,
        log_rise=ClusterMean(log_rise, half / t_quantile(0.95, 19), 20, 900),
        confidence=0.95,
        estimator="kl",
        nll_rise=0.012,
        nll_rise_se=0.01,
        nll_perplexity_rise=0.012,
        kl=0.01,
        kl_se=0.002,
        token_kl=0.2,
        worst_sequence_rise=0.05,
        worst_sequence=3,
        tokens=900,
        sequences=20,
        non_finite=0,
    )
    return replace(scores, **changes)


GOOD = measured()
SLOT = StagedSlot("art", True, LAYERS)
EVIDENCE = Evidence("art", LAYERS, [SLOT, SLOT], GOOD, {"a.q_proj": 0.01})
LIMITS = Limits(0.03, 20, max_worst_rise=1.0, max_token_kl=2.0, max_weight_error=0.1)


def test_a_good_candidate_passes_and_the_reason_has_the_numbers():
    decision = decide(EVIDENCE, LIMITS)
    assert decision.accepted
    for number in ("1.00%", "0.50%", "1.51%", "900 tokens", "20 rollouts", "3.00%"):
        assert number in decision.reason


@pytest.mark.parametrize(
    ("slot", "match"),
    [
        (replace(SLOT, artifact_id=None), "incomplete: replica 1 has nothing"),
        (replace(SLOT, artifact_id="other"), "incomplete: replica 1 has other"),
        (replace(SLOT, complete=False), "incomplete: replica 1 has not filled"),
        (replace(SLOT, layers={**LAYERS, "a.q_proj": "bf16"}), "first a.q_proj: the engine runs"),
        (
            replace(SLOT, layers={"a.q_proj": "int8_dynamic"}),
            "a.down_proj: the engine runs nothing",
        ),
        (replace(SLOT, layers={**LAYERS, "b": "bf16"}), "the plan says nothing"),
    ],
)
def test_one_replica_that_differs_refuses(slot, match):
    decision = decide(replace(EVIDENCE, staged=[SLOT, slot]), LIMITS)
    assert not decision.accepted
    assert match in decision.reason


def test_no_replica_at_all():
    assert "no generator replica" in decide(replace(EVIDENCE, staged=[]), LIMITS).reason


def gate(rise: float = 0.01, half: float = 0.005, more: bool = False, **changes) -> Decision:
    return decide(replace(EVIDENCE, divergence=measured(rise, half, **changes)), LIMITS, more=more)


@pytest.mark.parametrize(
    ("rise", "half", "more", "expected"),
    [
        (0.01, 0.005, True, "accepted"),
        (0.01, 0.005, False, "accepted"),
        (0.05, 0.01, True, "refused"),
        (0.05, 0.01, False, "refused"),
        (0.029, 0.002, True, "undecided"),
        (0.031, 0.002, True, "undecided"),
        (0.029, 0.002, False, "accepted by the point estimate"),
        (0.031, 0.002, False, "refused by the point estimate"),
        (0.029, 0.0005, True, "accepted"),
        (0.031, 0.0005, True, "refused"),
        (0.01, math.inf, True, "undecided"),
        (0.01, math.inf, False, "accepted by the point estimate"),
        (-0.02, 0.005, True, "accepted"),
        (math.inf, 0.005, True, "refused"),
    ],
)
def test_the_interval_decides_and_the_point_estimate_only_at_the_end(rise, half, more, expected):
    decision = gate(rise, half, more)
    verdict = expected.split()[0]
    assert decision.accepted == (verdict == "accepted")
    assert decision.refused == (verdict == "refused")
    assert decision.undecided == (verdict == "undecided")
    assert ("point estimate" in decision.reason) == ("point estimate" in expected)
    assert ("undecided" in decision.reason) == (verdict != expected or verdict == "undecided")


def test_the_limit_itself_is_allowed_and_nothing_above():
    at = 0.03
    for estimate, accepted in ((at, True), (math.nextafter(at, 1), False)):
        decision = gate(0.03, 0.01, perplexity_rise=estimate)
        assert decision.accepted is accepted


@pytest.mark.parametrize(
    ("rise", "half", "text"),
    [
        (0.02, 50.0, "perplexity rise 2.00% [-100.00%, > 1000%] by kl"),
        (0.02, math.inf, "perplexity rise 2.00% [-100.00%, > 1000%] by kl"),
        (1e9, 0.01, "perplexity rise > 1000% [> 1000%, > 1000%] by kl"),
        (9.0, 0.01, "perplexity rise 900.00% [890."),
    ],
)
def test_numbers_that_say_nothing_are_not_spelled_out(rise, half, text):
    assert text in gate(rise, half).reason
    worst = gate(worst_sequence_rise=1e7).reason
    assert "worst rollout: perplexity rise > 1000% in number 3 of 20" in worst


def test_more_looks_ask_for_wider_intervals():
    one = replace(LIMITS, looks=1)
    three = replace(LIMITS, looks=3)
    assert one.look_confidence == pytest.approx(0.95)
    assert three.look_confidence == pytest.approx(1 - 0.05 / 3)
    close = replace(EVIDENCE, divergence=measured(0.024, 0.0055))
    assert decide(close, one, more=True).accepted
    assert decide(close, three, more=True).undecided


def test_looks_double_up_to_the_cap():
    assert looks(32, 128) == [32, 64, 128]
    assert looks(24, 100) == [24, 48, 96, 100]
    assert looks(32, 32) == looks(32, 8) == [32]


def test_limits_come_from_the_configuration():
    cfg = PTQConfig()
    limits = Limits.of(cfg)
    assert limits.max_perplexity_rise == cfg.guard.max_perplexity_rise
    assert limits.max_worst_rise == cfg.guard.max_worst_rise
    assert limits.max_token_kl == cfg.guard.max_token_kl
    assert limits.max_weight_error == cfg.guard.max_weight_error
    assert limits.confidence == cfg.guard.confidence
    assert limits.min_sequences == cfg.probe.min_sequences
    assert limits.looks == len(looks(cfg.probe.sequences, cfg.probe.max_sequences))
    assert Limits.of(cfg, 1).min_sequences == 1


def test_non_finite_refuses_whatever_the_estimate_says():
    for more in (False, True):
        decision = gate(non_finite=1, more=more)
        assert not decision.accepted
        assert "not finite" in decision.reason
        assert decision.refused
        assert gate(math.nan, more=more).refused


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"token_kl": 2.5}, "token KL: 99th percentile 2.5 nats over 900 tokens, limit 2"),
        ({"token_kl": math.nan}, "token KL"),
        (
            {"worst_sequence_rise": 1.5},
            "worst rollout: perplexity rise 150.00% in number 3 of 20, limit 100.00%",
        ),
        ({"worst_sequence_rise": math.nan}, "worst rollout"),
    ],
)
def test_what_the_mean_hides_refuses_though_more_could_be_scored(changes, match):
    decision = gate(more=True, **changes)
    assert (decision.accepted, decision.refused, decision.undecided) == (False, True, False)
    assert match in decision.reason


def test_tokens_without_kl_are_not_judged_by_it():
    assert gate(token_kl=None).accepted
    at_the_limits = gate(token_kl=2.0, worst_sequence_rise=1.0)
    assert at_the_limits.accepted


@pytest.mark.parametrize("error", [0.2, math.inf, math.nan])
def test_one_layer_whose_weights_are_far_off_refuses(error):
    errors = {"a.q_proj": error, "a.o_proj": 0.1, "a.k_proj": 0.11}
    decision = decide(replace(EVIDENCE, weight_error=errors), LIMITS, more=True)
    assert (decision.accepted, decision.refused) == (False, True)
    assert "weight error: 2 of 3 layers over the limit 10.00%, worst a.q_proj" in decision.reason
    del errors["a.q_proj"], errors["a.k_proj"]
    assert decide(replace(EVIDENCE, weight_error=errors), LIMITS).accepted


def test_limits_not_given_do_not_bind():
    wild = replace(GOOD, token_kl=50.0, worst_sequence_rise=90.0)
    evidence = replace(EVIDENCE, divergence=wild, weight_error={"a.q_proj": 3.0})
    assert decide(evidence, Limits(0.03, 20)).accepted


def test_too_few_rollouts_refuse():
    for more in (False, True):
        decision = gate(sequences=19, more=more)
        assert "scored 19, need 20" in decision.reason
        assert not decision.accepted
        assert decision.undecided == more


def test_only_scores_refuse():
    """What was not judged on its scores was not refused: it may be tried again."""
    assert gate(0.5).refused
    assert not gate().refused
    assert not gate(sequences=19).refused
    for slot in (replace(SLOT, complete=False), replace(SLOT, layers={})):
        assert not decide(replace(EVIDENCE, staged=[slot]), LIMITS).refused
    assert not decide(replace(EVIDENCE, divergence=None), LIMITS).refused


def test_unprobed_is_for_full_precision_only():
    assert "unprobed" in decide(replace(EVIDENCE, divergence=None), LIMITS).reason
    bf16 = dict.fromkeys(LAYERS, "bf16")
    slot = replace(SLOT, layers=bf16)
    assert decide(Evidence("art", bf16, [slot], None), LIMITS).accepted


def test_basic_gates_come_first():
    scores = measured(0.5, sequences=5, non_finite=5, token_kl=9.0, worst_sequence_rise=9.0)
    slot = replace(SLOT, complete=False, layers={})
    broken = replace(EVIDENCE, staged=[slot], weight_error={"a.q_proj": 1.0}, divergence=scores)
    repaired = [("incomplete", broken)]
    repaired += [("audit", replace(broken, staged=[replace(SLOT, layers={})]))]
    repaired += [("weight error", broken := replace(broken, staged=[SLOT]))]
    broken = replace(broken, weight_error={})
    repaired += [("not finite", broken)]
    for gate_, repair in (
        ("not enough", lambda d: replace(d, non_finite=0)),
        ("token KL", lambda d: replace(d, sequences=20)),
        ("worst rollout", lambda d: replace(d, token_kl=1.0)),
        ("perplexity rise", lambda d: replace(d, worst_sequence_rise=0.5)),
    ):
        scores = repair(scores)
        repaired += [(gate_, replace(broken, divergence=scores))]
    for start, evidence in repaired:
        decision = decide(evidence, LIMITS)
        assert decision.reason.startswith(start)
        assert not decision.accepted


def test_verdict_is_json():
    verdict = Verdict(version=3, perplexity_rise=math.nan, ci=(-math.inf, 0.5), kl=0.1)
    data = json.loads(json.dumps(verdict.to_dict(), allow_nan=False))
    assert data["perplexity_rise"] is None
    assert data["ci"] == [None, 0.5]
    assert (data["kl"], data["outcome"], data["version"]) == (0.1, "kept", 3)
    for name in ("quantize_s", "stage_s", "probe_s", "flip_s", "pause_s", "bytes"):
        assert data[name] is None, "what was not measured is not zero"
