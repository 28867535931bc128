"""The guard's gates, in order, and the verdict's JSON form."""

import json
import math
from dataclasses import replace

import pytest

from forge_ptq.numerics.divergence import Divergence
from forge_ptq.services.guard import Evidence, Limits, StagedSlot, decide
from forge_ptq.services.verdict import Verdict

LAYERS = {"a.q_proj": "int8_dynamic", "a.down_proj": "bf16"}
GOOD = Divergence(
    perplexity_rise=0.01,
    ci=(0.005, 0.015),
    estimator="kl",
    nll_rise=0.012,
    nll_rise_se=0.01,
    nll_perplexity_rise=0.012,
    kl=0.01,
    kl_se=0.002,
    worst_sequence_rise=0.05,
    worst_sequence=3,
    tokens=900,
    sequences=20,
    non_finite=0,
)
SLOT = StagedSlot("art", True, LAYERS)
EVIDENCE = Evidence("art", LAYERS, [SLOT, SLOT], GOOD)
LIMITS = Limits(0.03, min_sequences=20)


def test_a_good_candidate_passes_and_the_reason_has_the_numbers():
    decision = decide(EVIDENCE, LIMITS)
    assert decision.accepted
    for number in ("1.00%", "0.50%", "1.50%", "900 tokens", "20 rollouts", "3.00%"):
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


def gate(**changes):
    return decide(replace(EVIDENCE, divergence=replace(GOOD, **changes)), LIMITS)


def test_the_limit_itself_is_allowed_and_nothing_above():
    assert gate(perplexity_rise=0.03).accepted
    assert not gate(perplexity_rise=math.nextafter(0.03, 1)).accepted
    assert not gate(perplexity_rise=math.inf).accepted
    assert gate(perplexity_rise=-0.2).accepted


def test_non_finite_refuses_whatever_the_estimate_says():
    decision = gate(non_finite=1)
    assert not decision.accepted
    assert "not finite" in decision.reason
    assert decision.refused
    assert not gate(perplexity_rise=math.nan).accepted


def test_too_few_rollouts_refuse():
    assert "scored 19, need 20" in gate(sequences=19).reason


def test_only_scores_refuse():
    """What was not judged on its scores was not refused: it may be tried again."""
    assert gate(perplexity_rise=0.5).refused
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
    broken = replace(EVIDENCE, staged=[replace(SLOT, complete=False, layers={})])
    broken = replace(broken, divergence=replace(GOOD, non_finite=5))
    assert decide(broken, LIMITS).reason.startswith("incomplete")


def test_verdict_is_json():
    verdict = Verdict(version=3, perplexity_rise=math.nan, ci=(-math.inf, 0.5), kl=0.1)
    data = json.loads(json.dumps(verdict.to_dict(), allow_nan=False))
    assert data["perplexity_rise"] is None
    assert data["ci"] == [None, 0.5]
    assert (data["kl"], data["outcome"], data["version"]) == (0.1, "kept", 3)
    for name in ("quantize_s", "stage_s", "probe_s", "flip_s", "pause_s", "bytes"):
        assert data[name] is None, "what was not measured is not zero"
