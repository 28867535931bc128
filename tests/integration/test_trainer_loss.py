"""The loss within the trainer: micro-batches, mismatch per sequence, what is not finite."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_ptq.loss import GRPOLoss, token_logprobs
from forge_ptq.training.backward import response_logits
from forge_ptq.training.engine import TrainEngine
from tests.integration.trainer_support import RESPONSE, VOCAB, batch, config, save_policy, weights


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"), "qwen3")


@pytest.mark.parametrize(
    "settings",
    [
        {"aggregation": "token_mean"},
        {"aggregation": "token_mean", "rollout_correction": "icepop"},
        {"rollout_correction": "geometric_mask", "veto_ratio": 0.1},
    ],
    ids=str,
)
def test_micro_batches_equal_the_whole_batch(policy, settings):
    """Also where a correction leaves tokens out, which changes the denominator of the whole."""
    limits: dict[str, Any] = {
        "icepop_low": 0.7,
        "icepop_high": 1.6,
        "geometric_low": 0.5,
        "geometric_high": 2.0,
    }
    after = []
    for size in (8, 3):
        engine = TrainEngine(config(policy, local_batch_size=size), GRPOLoss(**settings, **limits))
        inputs, targets = batch(size=8)
        metrics = engine.step([inputs], [targets])
        after.append((metrics, weights(engine), engine.sequences))
    (whole, a, rows), (parts, b, same_rows) = after
    left_out = whole["masked_fraction"] + whole["vetoed_fraction"]
    assert (left_out > 0.1) == ("rollout_correction" in settings)
    assert whole["tokens"] == pytest.approx((1 - left_out) * float(targets["padding_mask"].sum()))
    for name in ("loss", "grad_norm", "kl_ref", "entropy", "ratio_mean", "ratio_max", "tokens"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-4), name
    for row, same in zip(rows, same_rows, strict=True):
        assert same == pytest.approx(row, rel=1e-4, abs=1e-5)
    assert max(float((a[k] - b[k]).abs().max()) for k in a) < 2e-4  # Adam amplifies rounding


def test_metrics_of_the_first_step(policy):
    """Of the policy itself as reference, and as the generator of half the sequences."""
    engine = TrainEngine(config(policy), GRPOLoss())
    inputs, targets = batch()
    with torch.no_grad():
        own = token_logprobs(
            response_logits(engine.built, inputs["tokens"], inputs["prompt_lens"], RESPONSE),
            targets["response"],
        )
    targets["ref_logprobs"] = targets["generator_logprobs"] = own
    # Two sequences of another age and scheme, whose generator was off by 0.2 nats per token.
    inputs["schemes"] = ["bf16", "int8_static+bf16", "int8_static+bf16", "bf16"]
    inputs["policy_versions"] = [0, -1, -1, 0]
    targets["generator_logprobs"] = own.clone()
    targets["generator_logprobs"][1:3] -= 0.2
    metrics = engine.step([inputs], [targets])
    for name in ("mismatch_k3/bf16", "mismatch_k3/age_0", "ratio_std/bf16"):
        assert metrics[name] == pytest.approx(0, abs=1e-4), name
    for name in ("max_abs_gap/bf16_int8_static", "max_abs_gap/age_1", "max_abs_gap"):
        assert metrics[name] == pytest.approx(0.2, abs=1e-4), name
    assert metrics["mismatch_k1/age_1"] == pytest.approx(-0.2, abs=1e-4)
    assert metrics["kl_ref"] == pytest.approx(0, abs=1e-6)
    assert metrics["ratio_max"] == pytest.approx(math.exp(0.2), abs=1e-4)
    lengths = targets["padding_mask"].sum(1).tolist()
    assert [row["tokens"] for row in engine.sequences] == lengths
    k1 = [row["k1_sum"] / row["tokens"] for row in engine.sequences]
    assert k1 == pytest.approx([0, -0.2, -0.2, 0], abs=1e-4)
    assert 0 < metrics["entropy"] < math.log(VOCAB)
    assert metrics["tokens"] == float(targets["padding_mask"].sum())


def test_plain_loss_in_torchforges_form(policy):
    def loss(logits, response, ref_logprobs, advantages, padding_mask):
        lp = token_logprobs(logits, response)
        ratio = torch.exp(lp - lp.detach())
        per_token = -(ratio * advantages) * padding_mask
        return (per_token.sum(1) / padding_mask.sum(1).clamp(min=1)).mean()

    plain = TrainEngine(config(policy, local_batch_size=3), loss)
    own = TrainEngine(config(policy), GRPOLoss(beta=0.0, rollout_correction="none"))
    inputs, targets = batch(size=8)
    a, b = (e.step([inputs], [dict(targets)]) for e in (plain, own))
    assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    assert plain.sequences == []


def test_logprobs_that_are_not_finite_do_not_stop_the_training(policy):
    engine = TrainEngine(config(policy), GRPOLoss())
    inputs, targets = batch()
    targets["generator_logprobs"][2, 0] = math.nan
    before = weights(engine)
    metrics = engine.step([inputs], [targets])
    assert metrics["skipped"] == 0
    lengths = targets["padding_mask"].sum(1)
    assert metrics["rejected_fraction"] == pytest.approx(float(lengths[2] / lengths.sum()))
    after = weights(engine)
    assert all(v.isfinite().all() for v in after.values())
    assert not all(torch.equal(v, before[k]) for k, v in after.items())
