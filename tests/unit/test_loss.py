"""GRPO loss against a slow reference and closed forms."""

import math

import pytest
import torch

from forge_ptq.loss import GRPOLoss, entropy, token_logprobs

B, R, V = 4, 6, 11


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(B, R, V, generator=generator)
    response = torch.randint(V, (B, R), generator=generator)
    lens = torch.tensor([[6], [1], [0], [3]])
    logprobs = token_logprobs(logits, response)
    return {
        "logits": logits,
        "response": response,
        "ref_logprobs": logprobs + 0.3 * torch.randn(B, R, generator=generator),
        "advantages": torch.tensor([[1.0], [-2.0], [0.5], [0.25]]),
        "padding_mask": torch.arange(R) < lens,
        "generator_logprobs": logprobs + 0.9 * torch.randn(B, R, generator=generator),
    }


def slow(batch: dict[str, torch.Tensor], beta: float, cap: float | None, token_mean: bool) -> float:
    """The same loss, one token at a time."""
    sequences, tokens = [], []
    for b in range(B):
        terms = []
        for r in range(R):
            if not batch["padding_mask"][b, r]:
                continue
            p = torch.softmax(batch["logits"][b, r].double(), -1)
            lp = math.log(p[batch["response"][b, r]])
            gap = float(batch["ref_logprobs"][b, r]) - lp
            w = math.exp(lp - float(batch["generator_logprobs"][b, r]))
            w = 1.0 if cap is None else min(w, cap)
            terms.append(-w * float(batch["advantages"][b, 0]) + beta * (math.exp(gap) - gap - 1))
        tokens += terms
        if terms:
            sequences.append(sum(terms) / len(terms))
    return sum(tokens) / len(tokens) if token_mean else sum(sequences) / len(sequences)


@pytest.mark.parametrize("correction", ["none", "tis"])
@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
def test_equals_slow_reference(batch, correction, aggregation):
    loss = GRPOLoss(beta=0.2, rollout_correction=correction, aggregation=aggregation, tis_cap=1.5)
    expected = slow(batch, 0.2, 1.5 if correction == "tis" else None, aggregation == "token_mean")
    assert float(loss(**batch).loss) == pytest.approx(expected, rel=1e-5)


def test_equal_policies_give_the_plain_policy_gradient(batch):
    logits = batch["logits"].clone().requires_grad_()
    logprobs = token_logprobs(logits, batch["response"])
    same = {**batch, "logits": logits}
    same["ref_logprobs"] = same["generator_logprobs"] = logprobs.detach()
    output = GRPOLoss(beta=0.5, aggregation="token_mean")(**same)
    (grad,) = torch.autograd.grad(output.loss, logits)
    mask = batch["padding_mask"]
    other = batch["logits"].clone().requires_grad_()
    plain = -(token_logprobs(other, batch["response"]) * batch["advantages"] * mask).sum()
    (expected,) = torch.autograd.grad(plain / mask.sum(), other)
    torch.testing.assert_close(grad, expected)
    assert float(output.sums["kl_ref"]) == pytest.approx(0, abs=1e-6)
    assert float(output.sums["mismatch_k3"]) == pytest.approx(0, abs=1e-6)
    assert float(output.maxima["ratio_max"]) == pytest.approx(1)


def test_ratio_is_capped_and_not_trained(batch):
    logits = batch["logits"][:1, :1].clone().requires_grad_()
    response = batch["response"][:1, :1]
    logprobs = token_logprobs(logits, response)

    def gradient(ratio: float) -> torch.Tensor:
        output = GRPOLoss(beta=0.0, tis_cap=2.0)(
            logits,
            response,
            logprobs.detach(),
            torch.ones(1, 1),
            torch.ones(1, 1, dtype=torch.bool),
            logprobs.detach() - math.log(ratio),
        )
        assert float(output.sums["ratio_capped"]) == float(ratio > 2.0)
        return torch.autograd.grad(output.loss, logits, retain_graph=True)[0]

    one = gradient(1.0)
    torch.testing.assert_close(gradient(0.25), 0.25 * one)
    torch.testing.assert_close(gradient(2.0), 2.0 * one)
    torch.testing.assert_close(gradient(1000.0), 2.0 * one)


def test_kl_gradient_pulls_towards_the_reference(batch):
    logits = torch.zeros(1, 1, 2, requires_grad=True)
    output = GRPOLoss(beta=1.0, rollout_correction="none")(
        logits,
        torch.zeros(1, 1, dtype=torch.long),
        torch.tensor([[math.log(0.9)]]),
        torch.zeros(1, 1),
        torch.ones(1, 1, dtype=torch.bool),
    )
    # d/d lp of exp(ref - lp) - (ref - lp) - 1 is 1 - 0.9 / 0.5; d lp / d logit_0 is 1 - 0.5.
    (grad,) = torch.autograd.grad(output.loss, logits)
    assert float(grad[0, 0, 0]) == pytest.approx((1 - 0.9 / 0.5) * 0.5)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
def test_all_masked_is_zero_with_zero_gradient(batch, aggregation):
    logits = batch["logits"].clone().requires_grad_()
    empty = {**batch, "logits": logits, "padding_mask": torch.zeros(B, R, dtype=torch.bool)}
    empty["ref_logprobs"] = torch.full((B, R), math.nan)
    empty["generator_logprobs"] = torch.full((B, R), -math.inf)
    output = GRPOLoss(aggregation=aggregation)(**empty)
    output.loss.backward()
    assert float(output.loss) == 0
    assert logits.grad is not None
    assert not logits.grad.any()
    assert all(float(v) == 0 for v in (*output.sums.values(), *output.maxima.values()))


def test_garbage_on_padding_changes_nothing(batch):
    loss = GRPOLoss()
    clean = loss(**batch)
    mask = batch["padding_mask"]
    dirty = dict(batch)
    for name in ("ref_logprobs", "generator_logprobs"):
        dirty[name] = batch[name].masked_fill(~mask, math.nan)
    dirty["response"] = batch["response"].masked_fill(~mask, 0)
    dirty["logits"] = batch["logits"].masked_fill(~mask.unsqueeze(-1), 1e30)
    output = loss(**dirty)
    assert float(output.loss) == float(clean.loss)
    for name, value in clean.sums.items():
        assert float(output.sums[name]) == pytest.approx(float(value), rel=1e-6), name


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
def test_parts_with_the_whole_denominator_add_up(batch, aggregation):
    loss = GRPOLoss(aggregation=aggregation)
    whole = float(loss(**batch).loss)
    denominator = loss.weight(batch["padding_mask"])
    parts = [
        float(loss(**{k: v[i : i + 1] for k, v in batch.items()}, denominator=denominator).loss)
        for i in range(B)
    ]
    assert sum(parts) == pytest.approx(whole, rel=1e-6)


def test_bf16_logits_are_scored_in_fp32(batch):
    logits = batch["logits"].bfloat16()
    exact = token_logprobs(logits.float(), batch["response"])
    assert torch.equal(token_logprobs(logits, batch["response"]), exact)
    assert token_logprobs(logits, batch["response"]).dtype == torch.float32


def test_entropy_of_uniform_and_certain():
    logits = torch.stack([torch.zeros(V), torch.tensor([1e4] + [0.0] * (V - 1))]).unsqueeze(0)
    torch.testing.assert_close(entropy(logits), torch.tensor([[math.log(V), 0.0]]))


@pytest.mark.parametrize(
    ("field", "value"),
    [("rollout_correction", "ppo"), ("aggregation", "mean"), ("tis_cap", 0.0), ("beta", -1.0)],
)
def test_bad_settings_are_named(field, value):
    with pytest.raises(ValueError, match=f"loss.{field}"):
        GRPOLoss(**{field: value})


def test_tis_without_generator_logprobs_is_refused(batch):
    del batch["generator_logprobs"]
    with pytest.raises(ValueError, match="generator_logprobs"):
        GRPOLoss()(**batch)
