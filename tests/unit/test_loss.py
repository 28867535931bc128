"""GRPO loss against a slow reference and closed forms."""

import math
from typing import Any

import pytest
import torch

from forge_ptq.loss import entropy, token_logprobs
from forge_ptq.mismatch import as_rows, reduce
from tests.unit.loss_reference import B, R, V, batch, grpo, slow_loss

AGGREGATIONS = ["sequence_mean", "token_mean", "fixed_length"]


@pytest.fixture
def data() -> dict[str, Any]:
    return batch()


SETTINGS: list[dict[str, Any]] = [
    {"rollout_correction": "none"},
    {"rollout_correction": "tis", "tis_cap": 1.5},
    {"rollout_correction": "sequence_tis", "tis_cap": 1.1},
    {"rollout_correction": "icepop", "icepop_low": 0.6, "icepop_high": 1.8},
    {"rollout_correction": "geometric_mask", "geometric_low": 0.8, "geometric_high": 1.35},
    {"rollout_correction": ["geometric_mask", "tis"], "geometric_high": 1.5},
    {"rollout_correction": ["icepop", "geometric_mask"], "geometric_high": 1.5},
    {"rollout_correction": "tis", "veto_ratio": 0.3},
    {"rollout_correction": "none", "clip_low": 0.2, "clip_high": 0.28},
    {"rollout_correction": "none", "clip_high": 0.1},
    {
        "rollout_correction": "geometric_mask",
        "geometric_low": 0.7,
        "geometric_high": 1.6,
        "clip_low": 0.4,
    },
    {"temperature": 0.7},
    {"temperature": 1.6, "rollout_correction": "icepop"},
]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_slow_reference(settings, aggregation, seed):
    loss = grpo(beta=0.2, aggregation=aggregation, length_divisor=17, **settings)
    data = batch(seed)
    assert float(loss(**data).loss.detach()) == pytest.approx(slow_loss(data, loss), rel=2e-5)


def test_settings_above_are_not_the_same_in_disguise(data):
    found = [slow_loss(data, grpo(beta=0.2, **s)) for s in SETTINGS]
    assert len({round(v, 6) for v in found}) == len(SETTINGS)


@pytest.mark.parametrize("settings", [*SETTINGS, {"clip_low": 0.2, "clip_against": "proximal"}])
def test_gradient_equals_differences_of_the_slow_reference(settings):
    """In fp64, along random directions: what the loss differentiates is its own value, with weights
    and the ratio's denominator held where they are."""
    data = batch(3)
    loss = grpo(beta=0.2, **settings)
    logits = data["logits"].clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(**{**data, "logits": logits}).loss, logits)
    # Held: the trainer's log-probabilities that weights and anchors are made from.
    own = token_logprobs(data["logits"].double(), data["response"], loss.temperature).detach()
    held = {**data, "old_logprobs": own.masked_fill(~data["padding_mask"], 0.0)}
    g = torch.Generator().manual_seed(1)
    for _ in range(4):
        step = torch.randn(data["logits"].shape, generator=g, dtype=torch.float64)
        ends = [
            slow_loss({**held, "logits": data["logits"].double() + sign * 1e-5 * step}, loss)
            for sign in (1, -1)
        ]
        expected = (ends[0] - ends[1]) / 2e-5
        assert float((grad.double() * step).sum()) == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("correction", ["none", "tis", "sequence_tis", "icepop", "geometric_mask"])
def test_equal_policies_give_the_plain_policy_gradient(data, correction):
    logits = data["logits"].clone().requires_grad_()
    logprobs = token_logprobs(logits, data["response"])
    same = {**data, "logits": logits}
    same["ref_logprobs"] = same["generator_logprobs"] = logprobs.detach()
    loss = grpo(beta=0.5, aggregation="token_mean", rollout_correction=correction)
    output = loss(**same)
    (grad,) = torch.autograd.grad(output.loss, logits)
    mask = data["padding_mask"]
    other = data["logits"].clone().requires_grad_()
    plain = -(token_logprobs(other, data["response"]) * data["advantages"] * mask).sum()
    (expected,) = torch.autograd.grad(plain / mask.sum(), other)
    torch.testing.assert_close(grad, expected)
    assert float(output.sums["kl_ref"]) == pytest.approx(0, abs=1e-6)
    numbers = reduce(as_rows(output.rows))
    assert numbers["mismatch_k3"] == pytest.approx(0, abs=1e-12)
    assert numbers["ratio_max"] == numbers["ess"] == pytest.approx(1)


def test_unclipped_ppo_against_the_generator_is_importance_sampling(data):
    """Nothing is clipped where the bounds are wide: the gradient is that of weights without cap."""
    grads = []
    several: list[dict[str, Any]] = [
        {"rollout_correction": "none", "clip_low": 0.999, "clip_high": 1e6},
        {"rollout_correction": "tis", "tis_cap": 1e9},
    ]
    for settings in several:
        logits = data["logits"].clone().requires_grad_()
        output = grpo(beta=0.0, **settings)(**{**data, "logits": logits})
        grads.append(torch.autograd.grad(output.loss, logits)[0])
        assert not output.sums["clipped"]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("ratio", "advantage", "flows"),
    [(1.3, 1.0, False), (1.27, 1.0, True), (0.1, 1.0, True),
     (0.7, -1.0, False), (0.82, -1.0, True), (3.0, -1.0, True)],
)  # fmt: skip
@pytest.mark.parametrize("against", ["generator", "proximal"])
def test_clip_higher_stops_what_went_far_enough(ratio, advantage, flows, against):
    logits = torch.tensor([[[0.3, -0.2, 0.9]]], requires_grad=True)
    response = torch.tensor([[1]])
    own = token_logprobs(logits.detach(), response)
    loss = grpo(
        beta=0.0, rollout_correction="none", clip_low=0.2, clip_high=0.28, clip_against=against
    )
    anchor = own - math.log(ratio)
    rest = {"ref_logprobs": own, "padding_mask": torch.ones(1, 1, dtype=torch.bool)}
    output = loss(
        logits, response, advantages=torch.full((1, 1), advantage), **rest,
        generator_logprobs=anchor if against == "generator" else own,
        old_logprobs=anchor if against == "proximal" else None,
    )  # fmt: skip
    (grad,) = torch.autograd.grad(output.loss, logits)
    p = torch.softmax(logits.detach(), -1)
    plain = -advantage * ratio * (torch.tensor([0.0, 1.0, 0.0]) - p)
    torch.testing.assert_close(grad, plain if flows else torch.zeros_like(plain))
    assert float(output.sums["clipped"]) == float(not flows)
    assert float(output.denominator) == 1  # clipped, but counted


def test_decoupled_weights_correct_from_generator_to_proximal(data):
    loss = grpo(beta=0.1, clip_low=0.1, clip_high=0.2, clip_against="proximal", tis_cap=1.4)
    own = token_logprobs(data["logits"], data["response"])
    data["old_logprobs"] = own + 0.3 * torch.randn(B, R, generator=torch.Generator().manual_seed(5))
    assert float(loss(**data).loss) == pytest.approx(slow_loss(data, loss), rel=2e-5)


def test_kl_gradient_pulls_towards_the_reference():
    logits = torch.zeros(1, 1, 2, requires_grad=True)
    output = grpo(beta=1.0, rollout_correction="none")(
        logits,
        torch.zeros(1, 1, dtype=torch.long),
        torch.tensor([[math.log(0.9)]]),
        torch.zeros(1, 1),
        torch.ones(1, 1, dtype=torch.bool),
    )
    # d/d lp of exp(ref - lp) - (ref - lp) - 1 is 1 - 0.9 / 0.5; d lp / d logit_0 is 1 - 0.5.
    (grad,) = torch.autograd.grad(output.loss, logits)
    assert float(grad[0, 0, 0]) == pytest.approx((1 - 0.9 / 0.5) * 0.5)
    assert output.rows is None


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_all_masked_is_zero_with_zero_gradient(data, aggregation):
    logits = data["logits"].clone().requires_grad_()
    empty = {**data, "logits": logits, "padding_mask": torch.zeros(B, R, dtype=torch.bool)}
    empty["ref_logprobs"] = torch.full((B, R), math.nan)
    empty["generator_logprobs"] = torch.full((B, R), -math.inf)
    output = grpo(aggregation=aggregation, length_divisor=3)(**empty)
    output.loss.backward()
    assert float(output.loss.detach()) == float(output.denominator) == 0
    assert logits.grad is not None
    assert not logits.grad.any()
    assert all(float(v) == 0 for v in output.sums.values())
    assert not output.rows.any()


def test_garbage_on_padding_changes_nothing(data):
    loss = grpo()
    clean = loss(**data)
    mask = data["padding_mask"]
    logits = data["logits"].masked_fill(~mask.unsqueeze(-1), math.nan).requires_grad_()
    dirty = {**data, "logits": logits, "response": data["response"].masked_fill(~mask, 0)}
    output = loss(**dirty)
    assert float(output.loss.detach()) == float(clean.loss)
    for name, value in clean.sums.items():
        assert float(output.sums[name]) == pytest.approx(float(value), rel=1e-6), name
    assert torch.autograd.grad(output.loss, logits)[0].isfinite().all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_parts_with_the_whole_denominator_add_up(data, aggregation, settings):
    """What the trainer does: divide by any number, scale by the quotient once the count is known.
    Rows of the parts are the rows of the whole, bit for bit."""
    loss = grpo(aggregation=aggregation, length_divisor=7, **settings)
    whole = loss(**data)
    planned = loss.weight(data["padding_mask"])
    cuts = [slice(0, 1), slice(1, 4), slice(4, 5)]
    parts = [loss(**{k: v[i] for k, v in data.items()}, denominator=planned) for i in cuts]
    counted = sum(float(p.denominator) for p in parts)
    assert counted == float(whole.denominator) <= planned
    total = sum(float(p.loss) for p in parts) * planned / max(counted, 1)
    assert total == pytest.approx(float(whole.loss), rel=1e-5, abs=1e-7)
    assert torch.equal(torch.cat([p.rows for p in parts]), whole.rows)
    for name, value in whole.sums.items():
        assert sum(float(p.sums[name]) for p in parts) == pytest.approx(float(value), rel=1e-5), (
            name
        )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_long_response_of_many_small_gaps(aggregation):
    """4,096 tokens: sums in fp32 hold, the sequence's ratio is the mean's and not the product's."""
    g = torch.Generator().manual_seed(0)
    length = 4096
    logits = torch.randn(2, length, 7, generator=g)
    response = torch.randint(7, (2, length), generator=g)
    own = token_logprobs(logits, response)
    data = {
        "logits": logits,
        "response": response,
        "ref_logprobs": own + 0.1 * torch.randn(2, length, generator=g),
        "advantages": torch.tensor([[1.0], [-0.5]]),
        "padding_mask": torch.arange(length) < torch.tensor([[4096], [4095]]),
        "generator_logprobs": own - 0.05 + 0.1 * torch.randn(2, length, generator=g),
    }
    for correction in ("tis", "sequence_tis", "geometric_mask"):
        loss = grpo(aggregation=aggregation, length_divisor=4096, rollout_correction=correction)
        output = loss(**data)
        assert float(output.loss) == pytest.approx(slow_loss(data, loss), rel=1e-4)
        assert float(output.sums["tokens"]) == 8191
    row = as_rows(output.rows)[0]
    assert row["k1_sum"] / row["tokens"] == pytest.approx(-0.05, abs=0.01)


def test_bf16_logits_are_scored_in_fp32(data):
    logits = data["logits"].bfloat16()
    exact = token_logprobs(logits.float(), data["response"])
    assert torch.equal(token_logprobs(logits, data["response"]), exact)
    assert token_logprobs(logits, data["response"], 0.5).dtype == torch.float32


def test_entropy_of_uniform_certain_and_impossible():
    certain = torch.tensor([1e4] + [0.0] * (V - 1))
    impossible = torch.tensor([0.0, 0.0] + [-math.inf] * (V - 2))
    logits = torch.stack([torch.zeros(V), certain, impossible]).unsqueeze(0)
    torch.testing.assert_close(entropy(logits), torch.tensor([[math.log(V), 0.0, math.log(2)]]))
    coin = torch.tensor([[[0.0, 1.0]]])
    p = 1 / (1 + math.exp(2))
    expected = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert float(entropy(coin, temperature=0.5)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("rollout_correction", {"rollout_correction": "ppo"}),
        ("rollout_correction", {"rollout_correction": ["tis", "icepop"]}),
        ("rollout_correction", {"rollout_correction": ["geometric_mask", "geometric_mask"]}),
        ("rollout_correction", {"clip_low": 0.2}),  # and tis: the ratio would count twice
        ("aggregation", {"aggregation": "mean"}),
        ("length_divisor", {"aggregation": "fixed_length"}),
        ("tis_cap", {"tis_cap": 0.0}),
        ("beta", {"beta": -1.0}),
        ("icepop_low", {"icepop_low": 5.0}),
        ("geometric_low", {"geometric_low": 1.2}),
        ("veto_ratio", {"veto_ratio": 1.0}),
        ("clip_low", {"clip_low": 1.0, "rollout_correction": "none"}),
        ("temperature", {"temperature": 0.0}),
    ],
)
def test_bad_settings_are_named(field, settings):
    with pytest.raises(ValueError, match=rf"loss\.{field}: got "):
        grpo(**settings)


@pytest.mark.parametrize(
    ("settings", "key"),
    [({}, "rollout_correction"), ({"rollout_correction": "none", "clip_low": 0.2}, "clip_against")],
)
def test_what_needs_the_generator_says_so(data, settings, key):
    del data["generator_logprobs"]
    with pytest.raises(ValueError, match=rf"loss\.{key}: .*generator_logprobs"):
        grpo(**settings)(**data)
