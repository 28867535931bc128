"""What a quantized policy would say, against an independent simulation of the whole model."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from forge_ptq.numerics.calibration import Calibration
from forge_ptq.numerics.divergence import kl_per_token
from forge_ptq.numerics.plan import QuantPlan
from forge_ptq.numerics.schemes import get_scheme
from forge_ptq.services.policy_batches import make_batches
from forge_ptq.services.policy_copy import PolicyCopy
from forge_ptq.services.sampler import Rollout
from tests.models import tiny_model

MIXED = {"*": "int8_static", "*.o_proj": "int8_dynamic", "*layers.1.mlp.down_proj": "bf16"}


def rollouts(lengths, seed=0) -> list[Rollout]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Rollout(
            torch.randint(0, 64, (n,), generator=generator).tolist(), 1 + n // 3, 0.0, 0, str(i)
        )
        for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen2"])
def policy(request):
    model = tiny_model(request.param)
    copied = PolicyCopy(model, QuantPlan.from_config("int8_dynamic", MIXED))
    # Logits far from uniform, and channels of very different size for smoothing to even out.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter *= 8 if parameter.shape[0] == 64 else 3
        for layer in model.model.layers:
            for norm, members in (
                (layer.input_layernorm, ("q_proj", "k_proj", "v_proj")),
                (layer.post_attention_layernorm, ("gate_proj", "up_proj")),
            ):
                norm.weight[3] *= 40
                block = layer.self_attn if "q_proj" in members else layer.mlp
                for member in members:
                    getattr(block, member).weight[:, 3] /= 40
    copied.version = 1
    return copied


@pytest.fixture(scope="module")
def calibrated(policy):
    batches = make_batches(rollouts([20, 9, 31], seed=1))
    shift, alpha = policy.smooth(policy.observe(batches), 0.8, down_proj=True)
    stats = policy.observe(batches, shift)
    absmax = {m: stats[site].absmax for site, members in policy.sites.items() for m in members}
    return Calibration(1, 1, policy.layers, absmax, shift, stats, alpha=alpha)


def served(policy: PolicyCopy, calibration: Calibration) -> Any:
    """The artifact's weights in the model, its activations rounded by hooks."""
    tensors, layers, _ = policy.quantize(policy.layers, calibration)
    model = copy.deepcopy(policy.model)
    state = {}
    for name in policy.parameters:
        layer = name.removesuffix(".weight")
        if name.endswith(".weight") and layer in layers:
            parts = {part: tensors[f"{layer}.{part}"] for part in get_scheme(layers[layer]).PARTS}
            state[name] = get_scheme(layers[layer]).dequantize(parts)
        else:
            state[name] = tensors[name].float()
    model.load_state_dict(state, strict=False)

    def static(scale_1):
        return lambda _, args: ((args[0] * (1 / scale_1)).round().clamp(-128, 127) * scale_1,)

    def dynamic(_, args):
        s_M1 = args[0].abs().amax(-1, keepdim=True) / 127
        return ((args[0] * (1 / s_M1)).round() * s_M1,)

    for name, scheme in layers.items():
        module = model.get_submodule(name)
        if scheme == "int8_static":
            module.register_forward_pre_hook(static(tensors[f"{name}.input_scale"]))
        elif scheme == "int8_dynamic":
            module.register_forward_pre_hook(dynamic)
    return model


def bf16_weights(model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())


def test_scores_are_those_of_the_artifact(policy, calibrated):
    bf16_weights(policy.model)  # as pushed; the artifact's unquantized tensors are bf16
    sequences = rollouts([25, 3, 14, 2], seed=2)
    model = served(policy, calibrated)
    scores = policy.evaluator(sequences, calibrated.shift).scores(policy.layers, calibrated.absmax)
    assert not [m for m in policy.model.modules() if "forward" in vars(m)]
    total = 0.0
    for i, sequence in enumerate(sequences):
        tokens = torch.tensor([sequence.token_ids])
        span = slice(sequence.response_start - 1, len(sequence.token_ids) - 1)
        with torch.no_grad():
            expected_RV = model(tokens).logits[0, span]
            reference_RV = policy.model(tokens).logits[0, span]
        targets_R = tokens[0, sequence.response_start :]
        # A rounding at a half may fall either way, which moves a few scores by a quantum.
        for got_R, logits_RV, tolerance in (
            (scores.logprobs_GR[i], expected_RV, 5e-3),
            (scores.reference_GR[i], reference_RV, 1e-4),
        ):
            wanted_R = -F.cross_entropy(logits_RV, targets_R, reduction="none")
            torch.testing.assert_close(got_R, wanted_R, rtol=0, atol=tolerance)
        kl_R = kl_per_token(reference_RV, expected_RV)
        torch.testing.assert_close(scores.kl_GR[i], kl_R, rtol=0.05, atol=1e-4)
        total += float(kl_R.sum())
    assert total > 1e-3


def test_all_bf16_is_the_reference_and_smoothing_does_not_change_that(policy, calibrated):
    plain = policy.evaluate(
        dict.fromkeys(policy.layers, "bf16"), {}, calibrated.shift, rollouts([9, 12])
    )
    assert max(float(kl_R.abs().max()) for kl_R in plain) < 1e-6


def test_smoothing_helps_where_channels_differ(policy, calibrated):
    sequences = rollouts([25, 30], seed=3)
    batches = make_batches(rollouts([20, 9, 31], seed=1))
    raw = policy.observe(batches)
    ranges = {m: raw[site].absmax for site, members in policy.sites.items() for m in members}
    layers = {
        name: "bf16" if name.endswith(("o_proj", "down_proj")) else "int8_static"
        for name in policy.layers
    }
    before = sum(float(kl_R.sum()) for kl_R in policy.evaluate(layers, ranges, None, sequences))
    after = sum(
        float(kl_R.sum())
        for kl_R in policy.evaluate(layers, calibrated.absmax, calibrated.shift, sequences)
    )
    assert after < 0.5 * before


def test_a_static_group_without_a_range_is_evaluated_as_it_is_quantized(policy, calibrated):
    static = dict.fromkeys(policy.layers, "int8_static")
    dynamic = dict.fromkeys(policy.layers, "int8_dynamic")
    evaluator = policy.evaluator(rollouts([12], seed=4), calibrated.shift)
    for a, b in zip(
        evaluator.scores(static, {}).kl_GR, evaluator.scores(dynamic, {}).kl_GR, strict=True
    ):
        assert torch.equal(a, b)


def test_an_evaluator_is_for_one_version(policy):
    evaluator = policy.evaluator(rollouts([5]))
    policy.version = 2
    try:
        with pytest.raises(ValueError, match="version 1, loaded is 2"):
            evaluator.scores(policy.layers, {})
    finally:
        policy.version = 1


def test_failing_forwards_leave_no_patches(policy, monkeypatch):
    evaluator = policy.evaluator(rollouts([5]))
    monkeypatch.setattr(policy, "reference", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluator.scores(policy.layers, {})
    assert not [m for m in policy.model.modules() if "forward" in vars(m)]


def test_shares_add_up_to_the_whole_artifact(policy, calibrated):
    whole, layers, _ = policy.quantize(policy.layers, calibrated)
    for count in (1, 3, 50):
        shares = policy.shares(count)
        assert len(shares) == count
        assert sorted(name for share in shares for name in share) == sorted(policy.parameters)
        tensors: dict[str, torch.Tensor] = {}
        used: dict[str, str] = {}
        for share in shares:
            if share:
                part, part_layers, notes = policy.quantize(policy.layers, calibrated, names=share)
                assert not tensors.keys() & part.keys()
                assert not notes
                tensors |= part
                used |= part_layers
        assert used == layers
        assert tensors.keys() == whole.keys()
        assert all(torch.equal(tensors[name], whole[name]) for name in whole)
    for share in policy.shares(3):
        for name in share:
            if name.endswith("q_proj.weight"):
                assert name.replace("q_proj", "v_proj") in share
    loads = [sum(math.prod(policy.shapes[n]) for n in share) for share in policy.shares(2)]
    assert max(loads) < 1.3 * min(loads)
    with pytest.raises(ValueError, match="stray is no parameter"):
        policy.quantize(policy.layers, calibrated, names=["stray"])


def test_observing_in_parts_adds_up(policy):
    batches = make_batches(rollouts([20, 9, 31, 4, 17], seed=5), 40)
    assert len(batches) > 2
    done: list[int] = []
    whole = policy.observe(batches, on_batch=done.append)
    assert done == list(range(1, len(batches) + 1))
    assert whole["model.layers.0.self_attn.q_proj"].tokens == 20 + 9 + 31 + 4 + 17
    first, second = policy.observe(batches[:1]), policy.observe(batches[1:])
    for site, stats in whole.items():
        merged = first[site].merge(second[site])
        assert merged.tokens == stats.tokens
        assert torch.equal(merged.absmax_C, stats.absmax_C)
        assert torch.equal(merged.histogram_B, stats.histogram_B)


def test_batches_do_not_depend_on_the_order_of_arrival():
    sequences = rollouts([5, 9, 5, 30, 2, 9, 12])
    batches = make_batches(sequences, 24)
    assert make_batches(sequences[::-1], 24) == batches
    lengths = [[len(s.token_ids) for s in batch] for batch in batches]
    assert lengths == [[2, 5, 5], [9, 9], [12], [30]]
    assert make_batches([], 24) == []
    with pytest.raises(ValueError, match="batch_tokens"):
        make_batches(sequences, 0)
