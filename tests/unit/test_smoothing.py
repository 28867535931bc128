"""Power-of-two smoothing: sites found, factors chosen, folding exact to the bit."""

import copy
import math

import pytest
import torch

from forge_ptq.numerics.smoothing import (
    MAX_SHIFT,
    Folding,
    SmoothingError,
    SmoothingSite,
    expected_error,
    factors,
    log2_factors,
    smooth_site,
    smoothing_sites,
)
from forge_ptq.numerics.stats import measure
from tests.models import tiny_model


def shapes_of(model):
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def chosen(x_TC, w_NC, alpha):
    """Factors of a site of one member whose input is x_TC."""
    return smooth_site(SmoothingSite("s", ("s",), "p"), measure(x_TC), [w_NC], alpha)[1]


@pytest.fixture(scope="module")
def models():
    return {kind: tiny_model(kind) for kind in ("llama", "qwen3", "qwen2", "gemma2")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2"])
def test_folding_leaves_logits_bit_identical(models, kind, dtype):
    model = copy.deepcopy(models[kind]).to(dtype)
    sites = smoothing_sites(shapes_of(model), model.config, down_proj=True)
    assert len(sites) == 2 * 4
    generator = torch.Generator().manual_seed(1)
    shifts = {}
    for name, site in sites.items():
        width = model.get_submodule(name).in_features // site.repeat
        shift_P = torch.randint(-6, 7, (width,), generator=generator, dtype=torch.int8)
        shifts[name] = site.expand(shift_P)
    tokens = torch.randint(0, 64, (3, 17), generator=generator)
    before = model(tokens).logits
    state = dict(model.named_parameters())
    folding = Folding(sites, shifts)
    folded = {name: folding.apply(name, tensor) for name, tensor in state.items()}
    changed = {name for name in state if not torch.equal(folded[name], state[name])}
    assert {n for n in changed if "layers.0" in n} == {
        f"model.layers.0.{n}"
        for n in [
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
            *[f"self_attn.{leaf}.weight" for leaf in ("q_proj", "k_proj", "v_proj", "o_proj")],
            *[f"mlp.{leaf}.weight" for leaf in ("gate_proj", "up_proj", "down_proj")],
            *(["self_attn.v_proj.bias"] if kind == "qwen2" else []),
        ]
    }
    model.load_state_dict(folded, strict=False)
    assert torch.equal(model(tokens).logits, before)


def test_sites_are_found_by_their_wiring(models):
    sites = smoothing_sites(shapes_of(models["llama"]), models["llama"].config)
    layer = "model.layers.1."
    assert [name for name in sites if name.startswith(layer)] == [
        f"{layer}self_attn.q_proj",
        f"{layer}self_attn.o_proj",
        f"{layer}mlp.gate_proj",
    ]
    assert sites[f"{layer}self_attn.q_proj"].producer == f"{layer}input_layernorm"
    assert sites[f"{layer}mlp.gate_proj"].members[1] == f"{layer}mlp.up_proj"
    assert (
        sites[f"{layer}self_attn.o_proj"].repeat,
        sites[f"{layer}self_attn.o_proj"].head_dim,
    ) == (2, 8)


def test_what_does_not_fit_is_left_out(models):
    model = models["llama"]
    shapes = shapes_of(model)
    assert smoothing_sites(shapes_of(models["gemma2"]), models["gemma2"].config) == {}
    without = {n: s for n, s in shapes.items() if n != "model.layers.0.input_layernorm.weight"}
    assert "model.layers.0.self_attn.q_proj" not in smoothing_sites(without, model.config)
    partial = {n: s for n, s in shapes.items() if n != "model.layers.0.self_attn.k_proj.weight"}
    left = smoothing_sites(partial, model.config)
    assert "model.layers.0.self_attn.q_proj" not in left
    assert "model.layers.0.self_attn.o_proj" in left
    narrow = {**shapes, "model.layers.0.self_attn.v_proj.weight": (8, 32)}
    assert "model.layers.0.self_attn.o_proj" not in smoothing_sites(narrow, model.config)


def test_factors_follow_the_formula():
    generator = torch.Generator().manual_seed(0)
    a_C = torch.rand(37, generator=generator) * 20 + 0.01
    w_C = torch.rand(37, generator=generator) + 0.01
    log_C = log2_factors(a_C, w_C, 0.8)
    raw = [math.log2(float(a) ** 0.8 / float(w) ** 0.2) for a, w in zip(a_C, w_C, strict=True)]
    centre = sorted(raw)[18]
    assert log_C.tolist() == pytest.approx([value - centre for value in raw], abs=1e-6)
    shift_C = chosen(a_C[None], w_C[None], 0.8)
    assert shift_C.dtype == torch.int8
    assert torch.equal(shift_C, log_C.round().to(torch.int8))
    assert torch.equal(factors(shift_C).double(), 2.0 ** shift_C.double())


def test_dead_channels_keep_factor_one_and_outliers_are_clamped():
    a_C = torch.tensor([0.0, 1.0, 3e38, 2.0, 1e-38, 5.0, 1.0])
    w_C = torch.tensor([0.5, 0.0, 0.1, 0.1, 0.1, 0.1, 0.1])
    shift_C = chosen(a_C[None], w_C[None], 0.9)
    assert shift_C[:2].tolist() == [0, 0]
    assert (int(shift_C[2]), int(shift_C[4])) == (MAX_SHIFT, -MAX_SHIFT)
    assert bool(torch.isfinite(factors(shift_C)).all())
    assert chosen(torch.zeros(2, 5), torch.ones(1, 5), 0.5).tolist() == [0] * 5
    assert chosen(a_C[None], w_C[None], 0.0).tolist() == [0] * 7


def test_non_finite_input_is_refused():
    good_C = torch.ones(4)
    for bad in (math.nan, math.inf, -1.0):
        bad_C = torch.tensor([1.0, bad, 1.0, 1.0])
        with pytest.raises(SmoothingError, match=r"s1: ranges"):
            log2_factors(bad_C, good_C, 0.5, name="s1")
        with pytest.raises(SmoothingError, match="weights"):
            log2_factors(good_C, bad_C, 0.5)
    with pytest.raises(SmoothingError, match="1 activations"):
        chosen(torch.tensor([[1.0, math.nan]]), torch.ones(1, 2), 0.5)
    with pytest.raises(SmoothingError, match="alpha"):
        log2_factors(good_C, good_C, 1.5)


def test_expected_error_predicts_the_simulated_one():
    torch.manual_seed(0)
    channels, tokens, rows = 45, 4000, 24
    x_TC = torch.randn(tokens, channels) * torch.exp(torch.randn(channels))
    w_NC = torch.randn(rows, channels) * 0.1
    stats = measure(x_TC)
    shift_C = chosen(x_TC, w_NC, 0.5)
    errors = {}
    for name, k_C in (("raw", torch.zeros(channels, dtype=torch.int8)), ("smooth", shift_C)):
        f_C = factors(k_C)
        x, w = x_TC / f_C, w_NC * f_C
        s_x, s_w = x.abs().max() / 127, w.abs().amax(1, keepdim=True) / 127
        y = ((x / s_x).round() * s_x) @ ((w / s_w).round() * s_w).T
        simulated = float((y - x_TC @ w_NC.T).square().sum(1).mean())
        errors[name] = expected_error(stats, [w_NC], k_C)
        assert errors[name] == pytest.approx(simulated, rel=0.2)
    assert errors["smooth"] < 0.7 * errors["raw"]


def test_alpha_is_chosen_by_expected_error():
    torch.manual_seed(0)
    site = SmoothingSite("s", ("s",), "p")
    w_NC = torch.randn(16, 32)
    flat_TC = torch.randn(500, 32).clamp(-2, 2)
    loud_TC = torch.randn(500, 32)
    loud_TC[:, 3] *= 300
    for x_TC in (flat_TC, loud_TC):
        stats = measure(x_TC)
        alpha, shift_C = smooth_site(site, stats, [w_NC])
        errors = {
            a: expected_error(stats, [w_NC], chosen(x_TC, w_NC, a))
            for a in (0.0, 0.5, 0.65, 0.8, 0.9)
        }
        assert errors[alpha] == min(errors.values())
        assert torch.equal(shift_C, chosen(x_TC, w_NC, alpha))
    assert alpha > 0
    assert int(shift_C.argmax()) == 3
    assert smooth_site(site, measure(flat_TC), [w_NC], 0.8)[0] == 0.8


def test_query_heads_share_the_factors_of_their_value_head():
    site = SmoothingSite("o", ("o",), "v", repeat=3, head_dim=2)
    x_C = torch.tensor([1.0, 2, 3, 40, 5, 6, 7, 8, 90, 10, 11, 12])
    assert site.reduce(x_C).tolist() == [5, 40, 90, 12]
    stats = measure(x_C[None])
    _, shift_C = smooth_site(site, stats, [torch.ones(3, 12)], 1.0)
    expected_P = chosen(site.reduce(x_C)[None], torch.ones(1, 4), 1.0)
    assert torch.equal(site.produced(shift_C), expected_P)
    assert torch.equal(site.expand(expected_P), shift_C)
    with pytest.raises(SmoothingError, match="query heads"):
        site.produced(torch.arange(12, dtype=torch.int8))


def test_folding_knows_only_its_sites(models):
    model = models["qwen3"]
    sites = smoothing_sites(shapes_of(model), model.config)
    with pytest.raises(SmoothingError, match=r"down_proj: has factors"):
        Folding(sites, {"model.layers.0.mlp.down_proj": torch.zeros(48, dtype=torch.int8)})
    folding = Folding(
        sites, {"model.layers.0.mlp.gate_proj": torch.full((32,), 3, dtype=torch.int8)}
    )
    norm_C = model.model.layers[0].post_attention_layernorm.weight
    name = "model.layers.0.post_attention_layernorm.weight"
    assert torch.equal(folding.apply(name, norm_C), norm_C / 8)
    half = folding.apply(name, norm_C.half())
    assert half.dtype == torch.float32
    assert folding.apply("model.norm.weight", norm_C) is norm_C
