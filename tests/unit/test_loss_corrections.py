"""Which tokens count and with what weight: at the limits, with non-finite values, in company."""

import math
from collections import Counter, defaultdict

import pytest
import torch

from forge_ptq.corrections import correct
from forge_ptq.loss import token_logprobs
from forge_ptq.mismatch import as_rows, reduce
from tests.unit.loss_reference import batch, grpo, slow_loss, tokens

NAN, INF = math.nan, math.inf


def of(ratios: list[list[float]], **settings):
    """The correction of sequences with these ratios; 0 is padding, NaN is not finite."""
    ratio = torch.tensor(ratios, dtype=torch.float64)
    return correct(
        ratio.log().float(), ratio != 0, ratio.isfinite() & (ratio > 0), grpo(**settings)
    )


@pytest.mark.parametrize("cap", [0.5, 2.0])
def test_weights_at_the_cap(cap):
    below, above = cap * (1 - 1e-5), cap * (1 + 1e-5)
    got = of([[below, above, 1e9, 1e-3]], rollout_correction="tis", tis_cap=cap, veto_ratio=None)
    torch.testing.assert_close(got.weight, torch.tensor([[below, cap, cap, 1e-3]]))
    assert got.capped.tolist() == [[False, True, True, False]]
    assert got.kept.all()


def test_sequence_weight_is_the_geometric_mean_whatever_the_length():
    got = of([[4.0, 1.0, 0, 0], [2.0, 2.0, 2.0, 2.0], [9.0, 9.0, 9.0, 0]],
             rollout_correction="sequence_tis", tis_cap=3.0)  # fmt: skip
    expected = torch.tensor([[2.0, 2.0, 1, 1], [2.0] * 4, [3.0, 3.0, 3.0, 1]])
    torch.testing.assert_close(got.weight, expected)
    assert got.capped.tolist() == [[False] * 4, [False] * 4, [True, True, True, False]]


def test_icepop_keeps_the_ratio_inside_and_drops_tokens_outside():
    low, high = 0.5, 5.0
    ratios = [low * 0.9999, low * 1.0001, 1.0, high * 0.9999, high * 1.0001]
    got = of([ratios], rollout_correction="icepop")
    assert got.kept.tolist() == [[False, True, True, True, False]]
    assert got.masked.tolist() == [[True, False, False, False, True]]
    torch.testing.assert_close(got.weight[0, 1:4], torch.tensor(ratios[1:4]))


def test_geometric_mask_judges_whole_sequences():
    # Geometric means 1, 1.21, 0.5; single tokens may be far off.
    sequences = [[3.0, 1 / 3, 0], [1.21, 1.21, 1.21], [0.5, 0, 0]]
    got = of(sequences, rollout_correction="geometric_mask")
    assert got.kept.tolist() == [[True, True, False], [False] * 3, [False] * 3]
    assert torch.equal(got.weight, torch.ones(3, 3))
    weighted = of(sequences, rollout_correction=["tis", "geometric_mask"])
    assert torch.equal(weighted.kept, got.kept)
    torch.testing.assert_close(weighted.weight[0, :2], torch.tensor([2.0, 1 / 3]))


def test_one_token_under_the_veto_drops_its_sequence():
    sequences = [[1.0, 0.9e-4, 3.0], [1.0, 1.1e-4, 3.0]]
    got = of(sequences, rollout_correction="none")
    assert got.vetoed.tolist() == [[True] * 3, [False] * 3]
    assert got.kept.tolist() == [[False] * 3, [True] * 3]
    assert of(sequences, rollout_correction="none", veto_ratio=None).kept.all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["generator_logprobs", "ref_logprobs", "logits", "old_logprobs"])
@pytest.mark.parametrize("correction", ["none", "tis", "sequence_tis", "icepop", "geometric_mask"])
def test_what_is_not_finite_drops_its_sequence_and_poisons_nothing(bad, where, correction):
    data = batch(2)
    loss = grpo(beta=0.3, rollout_correction=correction, geometric_low=0.1, geometric_high=9.0)
    if where == "old_logprobs":
        data[where] = token_logprobs(data["logits"], data["response"])
    data[where] = data[where].clone()
    data[where][0, 3] = bad  # of six tokens
    logits = data["logits"].clone().requires_grad_()
    output = loss(**{**data, "logits": logits})
    assert float(output.loss.detach()) == pytest.approx(slow_loss(data, loss), rel=2e-5)
    (grad,) = torch.autograd.grad(output.loss, logits)
    assert grad.isfinite().all()
    assert not grad[0].any()
    assert grad[1, 0].any()
    rows = as_rows(output.rows)
    assert [row["rejected"] for row in rows] == [6, 0, 0, 0, 0]
    # Five of its tokens can still be compared; where only the reference failed, all six.
    assert rows[0]["tokens"] == (6 if where == "ref_logprobs" else 5)
    numbers = reduce(rows)
    assert all(math.isfinite(v) for v in numbers.values())
    assert numbers["rejected_fraction"] == 6 / 15


def test_everything_rejected_is_a_zero_loss_and_no_evidence():
    data = batch()
    data["generator_logprobs"] = torch.full_like(data["generator_logprobs"], NAN)
    logits = data["logits"].clone().requires_grad_()
    output = grpo()(**{**data, "logits": logits})
    output.loss.backward()
    assert float(output.loss.detach()) == float(output.denominator) == 0
    assert logits.grad is not None
    assert not logits.grad.any()
    numbers = reduce(as_rows(output.rows))
    assert numbers["rejected_fraction"] == 1.0
    assert numbers["ess"] == numbers["mismatch_k3"] == 0.0


@pytest.mark.parametrize("seed", range(6))
def test_every_response_token_is_in_one_class(seed):
    data = batch(seed, spread=2.0)
    data["generator_logprobs"][3, 1] = INF
    loss = grpo(rollout_correction=["icepop", "geometric_mask"], veto_ratio=0.05)
    mask = data["padding_mask"]
    own = token_logprobs(data["logits"], data["response"])
    gap = own - data["generator_logprobs"]
    got = correct(gap, mask, gap.isfinite(), loss)
    classes = torch.stack([got.kept, got.masked, got.vetoed, got.rejected]).sum(0)
    assert torch.equal(classes, mask.long())
    reasons = Counter(t["why"] for found in tokens(data, loss) for t in found)
    for reason in ("masked", "vetoed", "rejected"):
        assert int(getattr(got, reason).sum()) == reasons[reason], reason


def test_huge_gaps_stay_finite():
    data = batch()
    mask = data["padding_mask"]
    own = token_logprobs(data["logits"], data["response"])
    for sign in (1, -1):
        data["generator_logprobs"] = (own + sign * 200.0).masked_fill(~mask, NAN)
        for correction in ("none", "tis", "sequence_tis", "icepop"):
            loss = grpo(rollout_correction=correction, veto_ratio=None)
            logits = data["logits"].clone().requires_grad_()
            output = loss(**{**data, "logits": logits})
            assert torch.autograd.grad(output.loss, logits)[0].isfinite().all()
            numbers = reduce(as_rows(output.rows))
            assert all(math.isfinite(v) for v in numbers.values())
            assert numbers["max_abs_gap"] == pytest.approx(200, rel=1e-4)  # told as it is


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_token_that_the_reference_alone_finds_likely_poisons_nothing(beta):
    """exp(ref - lp) of the first sequence is infinite; no veto drops it. The second is as ever."""
    logits = torch.zeros(2, 1, 3)
    logits[0, 0, 0] = -120.0
    logits.requires_grad_()
    logprobs = torch.tensor([[-1.0], [-2.0]])
    output = grpo(beta=beta, rollout_correction="none", veto_ratio=None)(
        logits,
        torch.zeros(2, 1, dtype=torch.long),
        logprobs,
        torch.ones(2, 1),
        torch.ones(2, 1, dtype=torch.bool),
        logprobs,
    )
    output.loss.backward()
    assert output.loss.isfinite()
    assert output.sums["kl_ref"].isfinite()
    assert logits.grad is not None
    assert logits.grad[0].isfinite().all()
    kl_gradient = 1 - math.exp(-2.0 + math.log(3))
    assert float(logits.grad[1, 0, 0]) == pytest.approx((-1 + beta * kl_gradient) * (2 / 3) / 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout_correction": "tis", "tis_cap": 1.2, "temperature": 0.7},
        {"rollout_correction": ["geometric_mask", "sequence_tis"], "tis_cap": 1.05,
         "geometric_low": 0.5, "geometric_high": 3.0, "temperature": 1.6},
        {"rollout_correction": "icepop", "icepop_low": 0.6, "veto_ratio": 0.2},
        {"rollout_correction": "none", "clip_low": 0.2, "clip_high": 0.28},
    ],
    ids=str,
)  # fmt: skip
def test_sums_are_over_the_tokens_that_count(settings):
    loss = grpo(beta=0.2, **settings)
    data = batch(1)
    sequences = tokens(data, loss)
    expected: dict[str, float] = defaultdict(float)
    for b, found in enumerate(sequences):
        mean = math.exp(sum(t["gap"] for t in found) / len(found)) if found else 0.0
        for r, t in enumerate(found):
            if t["why"]:
                continue
            scaled = (data["logits"][b, r].double() / loss.temperature).log_softmax(-1)
            ratio, clips = t["ratio"], loss.clip_low is not None
            held = min(max(ratio, 0.8), 1.28) if clips else 1.0
            surrogate = min((ratio if clips else 1.0) * t["advantage"], held * t["advantage"])
            whole = ratio if "tis" in loss.corrections() else mean
            weights = {"tis", "sequence_tis"} & set(loss.corrections())
            expected["tokens"] += 1
            expected["logprob"] += t["lp"]
            expected["kl_ref"] += math.exp(t["ref"] - t["lp"]) - (t["ref"] - t["lp"]) - 1
            expected["entropy"] -= float((scaled.exp() * scaled).sum())
            expected["policy_loss"] -= t["weight"] * surrogate
            expected["ratio_capped"] += bool(weights and whole > loss.tis_cap)
            expected["clipped"] += bool(clips and surrogate < ratio * t["advantage"])
    got = {name: float(value) for name, value in loss(**data).sums.items()}
    assert got == pytest.approx({name: expected[name] for name in got}, rel=1e-4)
    assert got["ratio_capped"] + got["clipped"] + (15 - got["tokens"]) > 0


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "fixed_length"])
def test_a_dropped_sequence_is_as_if_it_had_not_been_sampled(aggregation):
    """Out of numerator and denominator: the loss is that of the batch without it."""
    data = batch(4)
    settings = {"aggregation": aggregation, "length_divisor": 6}
    dropped = {**data, "generator_logprobs": data["generator_logprobs"].clone()}
    dropped["generator_logprobs"][4, 2] += 50  # a ratio of exp(-50): vetoed
    without = {k: v[:4] for k, v in data.items()}
    loss = grpo(rollout_correction="tis", **settings)
    assert float(loss(**dropped).loss) == pytest.approx(float(loss(**without).loss), rel=1e-6)


def test_a_masked_token_does_not_dilute_its_sequence():
    data = {k: v[:1].clone() for k, v in batch(4).items()}
    own = token_logprobs(data["logits"], data["response"])
    data["generator_logprobs"] = own.clone()
    data["generator_logprobs"][0, 5] -= 3.0  # the last token's ratio is 20
    loss = grpo(beta=0.0, rollout_correction="icepop")
    # Five tokens of ratio 1 and advantage 1 are left: their mean, not five sixths of it.
    assert float(loss(**data).loss) == pytest.approx(-1.0)
