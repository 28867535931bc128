"""PolicyCopy on tiny random models: loading, reference states, ranges, artifact tensors."""

import pytest
import torch
from torch import nn

from forge_ptq.artifact import QuantizedArtifact
from forge_ptq.numerics.plan import QuantPlan
from forge_ptq.numerics.schemes import QuantizationError, get_scheme
from forge_ptq.services.policy_batches import make_batches
from forge_ptq.services.policy_copy import PolicyCopy, build_model
from forge_ptq.services.sampler import Rollout
from tests.models import tiny_model

ALL_STATIC = QuantPlan.from_config("int8_static")


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def checkpoint(request, tmp_path_factory):
    model = tiny_model(request.param)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return model, path


def fresh(checkpoint, plan=None) -> PolicyCopy:
    model, path = checkpoint
    copy = PolicyCopy(build_model(path, "float32"), plan or QuantPlan.from_config("int8_dynamic"))
    copy.load(1, {name: p.detach() for name, p in model.named_parameters()})
    return copy


def rollouts(lengths, seed=0) -> list[Rollout]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Rollout(
            torch.randint(0, 64, (n,), generator=generator).tolist(), 1 + n // 3, 0.0, 0, str(i)
        )
        for i, n in enumerate(lengths)
    ]


def absmax(copy: PolicyCopy, sequences: list[Rollout]) -> dict[str, float]:
    stats = copy.observe(make_batches(sequences))
    return {name: stats[site].absmax for site, members in copy.sites.items() for name in members}


def test_reference_states_give_the_models_own_logits(checkpoint):
    model, _ = checkpoint
    sequences = rollouts([30, 5, 17, 2, 9, 50, 9])
    copy = fresh(checkpoint)
    copy.batch_tokens = 40
    hidden = copy.reference(sequences)
    for sequence, hidden_RH in zip(sequences, hidden, strict=True):
        with torch.no_grad():
            logits_TV = model(torch.tensor([sequence.token_ids])).logits[0]
        expected_RV = logits_TV[sequence.response_start - 1 : -1]
        assert hidden_RH.shape == (len(sequence.token_ids) - sequence.response_start, 32)
        with torch.no_grad():
            torch.testing.assert_close(model.lm_head(hidden_RH), expected_RV, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("start", [0, 5, 9])
def test_a_response_needs_a_prompt_and_a_token(checkpoint, start):
    with pytest.raises(ValueError, match="response_start"):
        fresh(checkpoint).reference([Rollout([1] * 5, start, 0.0, 0, "g")])


def test_ranges_equal_brute_force_over_unpadded_sequences(checkpoint):
    model, _ = checkpoint
    sequences = rollouts([20, 3, 11, 40])
    expected: dict[str, float] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: expected.__setitem__(
                name, max(expected.get(name, 0.0), float(args[0].abs().max()))
            )
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    ]
    with torch.no_grad():
        for sequence in sequences:
            model(torch.tensor([sequence.token_ids]))
    for hook in hooks:
        hook.remove()
    copy = fresh(checkpoint, ALL_STATIC)
    got = absmax(copy, sequences)
    assert sorted(got) == sorted(expected)
    seen = copy.observe(make_batches(sequences, 60))
    assert len(seen) == 2 * 4
    for site, members in copy.sites.items():
        assert seen[site].tokens == 20 + 3 + 11 + 40
        for name in members:
            assert got[name] == pytest.approx(expected[name], rel=1e-4)
            assert seen[site].absmax == pytest.approx(expected[name], rel=1e-4)


def test_position_zero_counts(checkpoint):
    copy = fresh(checkpoint, ALL_STATIC)
    name = "model.layers.0.self_attn.q_proj"
    before = absmax(copy, rollouts([12]))[name]
    sequence = rollouts([12])[0]
    loud = next(t for t in range(64) if t not in sequence.token_ids)
    channel = int(copy.parameters["model.layers.0.input_layernorm.weight"].argmax())
    with torch.no_grad():
        copy.parameters["model.embed_tokens.weight"][loud] = 0
        copy.parameters["model.embed_tokens.weight"][loud, channel] = 1
    sequence.token_ids[0] = loud
    assert absmax(copy, [sequence])[name] > before * 1.5


def test_non_finite_activations_are_counted(checkpoint):
    copy = fresh(checkpoint, ALL_STATIC)
    with torch.no_grad():
        copy.parameters["model.embed_tokens.weight"][7, 3] = float("nan")
    sequence = Rollout([1, 2, 7, 3], 2, 0.0, 0, "g")
    stats = copy.observe([[sequence]])["model.layers.0.self_attn.q_proj"]
    assert stats.non_finite == 32  # the whole token: its norm is not finite either
    assert stats.tokens == 4
    assert stats.absmax > 0


def test_artifact_tensors_of_a_mixed_plan(checkpoint):
    plan = QuantPlan.from_config(
        "int8_dynamic", {"*.[qkv]_proj": "int8_static", "*.o_proj": "bf16"}
    )
    copy = fresh(checkpoint, plan)
    tensors, layers, notes = copy.quantize(copy.layers, absmax(copy, rollouts([9, 30])))
    artifact = QuantizedArtifact.build(policy_version=1, model="m", layers=layers, tensors=tensors)
    artifact.verify()
    assert layers == copy.layers
    assert not notes
    tied = copy.model.config.tie_word_embeddings
    assert ("lm_head.weight" in tensors) is not tied
    for name, parameter in copy.parameters.items():
        layer = name.removesuffix(".weight")
        if layer in layers:
            expected = get_scheme(layers[layer]).quantize(parameter, absmax=1.0)["weight"]
            assert torch.equal(tensors[name], expected)
        else:
            assert torch.equal(tensors[name], parameter.bfloat16())


def test_fused_layers_share_the_largest_range(checkpoint):
    copy = fresh(checkpoint, ALL_STATIC)
    ranges = absmax(copy, rollouts([9, 30]))
    ranges["model.layers.1.self_attn.k_proj"] = 50.8
    tensors, _, _ = copy.quantize(copy.layers, ranges)
    for leaf in ("q_proj", "k_proj", "v_proj"):
        scale_1 = tensors[f"model.layers.1.self_attn.{leaf}.input_scale"]
        assert float(scale_1) == pytest.approx(0.4)


@pytest.mark.parametrize("missing", ["absent", "zero"])
def test_a_static_group_without_a_range_becomes_dynamic_with_a_note(checkpoint, missing):
    copy = fresh(checkpoint, ALL_STATIC)
    ranges = absmax(copy, rollouts([9]))
    group = [f"model.layers.0.mlp.{leaf}" for leaf in ("gate_proj", "up_proj")]
    for name in group:
        ranges.pop(name)
        if missing == "zero":
            ranges[name] = 0.0
    tensors, layers, notes = copy.quantize(copy.layers, ranges)
    assert sorted(notes) == group
    assert all(layers[name] == "int8_dynamic" for name in group)
    assert layers["model.layers.1.mlp.up_proj"] == "int8_static"
    QuantizedArtifact.build(policy_version=1, model="m", layers=layers, tensors=tensors).verify()


def test_corruption_is_well_formed_but_wrong(checkpoint):
    copy = fresh(checkpoint)
    good, layers, _ = copy.quantize(copy.layers, {})
    bad, _, _ = copy.quantize(copy.layers, {}, corrupt=True)
    QuantizedArtifact.build(policy_version=1, model="m", layers=layers, tensors=bad).verify()
    differing = {name for name in good if not torch.equal(good[name], bad[name])}
    assert differing == {f"{layer}.weight_scale" for layer in layers}
    norm = copy.quantize(copy.layers, {}, names=["model.norm.weight"], corrupt=True)[0]
    assert torch.equal(norm["model.norm.weight"], good["model.norm.weight"])
    with pytest.raises(ValueError, match="needs an int8 layer"):
        copy.quantize(dict.fromkeys(copy.layers, "bf16"), {}, corrupt=True)


def test_diverged_weights_are_refused_by_name(checkpoint):
    for name in ("model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        copy = fresh(checkpoint)
        with torch.no_grad():
            copy.parameters[name].view(-1)[3] = float("inf")
        with pytest.raises(QuantizationError, match=name.removesuffix(".weight")):
            copy.quantize(copy.layers, {})


def test_load_is_strict_and_all_or_nothing(checkpoint):
    copy = fresh(checkpoint)
    weights = {name: torch.zeros_like(p) for name, p in copy.parameters.items()}
    before = copy.parameters["model.norm.weight"].clone()
    name = "model.layers.0.mlp.up_proj.weight"
    without = {n: t for n, t in weights.items() if n != name}
    with pytest.raises(ValueError, match=rf"version 2: {name} is missing"):
        copy.load(2, without)
    with pytest.raises(ValueError, match=rf"{name} has shape \[3\]"):
        copy.load(2, {**weights, name: torch.zeros(3)})
    with pytest.raises(ValueError, match=r"stray: .* no such parameter"):
        copy.load(2, {**weights, "stray": torch.zeros(3)})
    assert copy.version == 1
    assert torch.equal(copy.parameters["model.norm.weight"], before)
    copy.load(2, weights)
    assert copy.version == 2
    assert float(copy.parameters["model.norm.weight"].abs().sum()) == 0


def test_tied_weights_may_come_under_either_name(checkpoint):
    copy = fresh(checkpoint)
    if not copy.model.config.tie_word_embeddings:
        assert "lm_head.weight" in copy.parameters
        return
    weights = {name: p.detach().clone() for name, p in copy.parameters.items()}
    table = weights.pop("model.embed_tokens.weight") + 1
    copy.load(2, {**weights, "lm_head.weight": table})
    assert torch.equal(copy.parameters["model.embed_tokens.weight"], table)
    assert torch.equal(copy.model.lm_head.weight, table)
    both = {**weights, "lm_head.weight": table, "model.embed_tokens.weight": table + 1}
    with pytest.raises(ValueError, match="tied"):
        copy.load(3, both)
    assert copy.version == 2
    assert torch.equal(copy.model.lm_head.weight, table)


def test_a_version_that_does_not_fit_is_refused_before_it_is_fetched(checkpoint):
    copy = fresh(checkpoint)
    assert copy.intake.slices(2, copy.shapes) == {}  # all of it is whole here
    assert copy.intake.slices(2, {**copy.shapes, "lm_head.weight": (64, 32)}) == {}
    missing = {name: shape for name, shape in copy.shapes.items() if name != "model.norm.weight"}
    for shapes, message in (
        (missing, r"policy version 2: model\.norm\.weight is missing \(1 tensors are\)"),
        ({**missing, "model.norm.weight": (3,)}, r"model\.norm\.weight has shape \[3\], .*\[32\]"),
        ({**copy.shapes, "model.other": (3,)}, r"model\.other: .*no such parameter"),
    ):
        with pytest.raises(ValueError, match=message):
            copy.intake.slices(2, shapes)


def test_unknown_dtype(checkpoint):
    with pytest.raises(ValueError, match="int8"):
        build_model(checkpoint[1], "int8")
