"""Plans: globs, precedence, protected layers, fused groups."""

import pytest

from forge_ptq.numerics.plan import PlanError, QuantPlan, group_of, never_quantized

LEAVES = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LEAVES += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
NAMES = [f"model.layers.{i}.{leaf}" for i in range(3) for leaf in LEAVES] + ["lm_head"]


def test_default_covers_every_linear_but_the_protected():
    layers = QuantPlan.from_config("int8_dynamic").resolve(NAMES)
    assert list(layers) == NAMES[:-1]
    assert set(layers.values()) == {"int8_dynamic"}


def test_last_matching_pattern_wins():
    plan = QuantPlan.from_config(
        "int8_dynamic", {"*.down_proj": "bf16", "model.layers.1.*": "int8_static"}
    )
    layers = plan.resolve(NAMES)
    assert layers["model.layers.0.mlp.down_proj"] == "bf16"
    assert layers["model.layers.1.mlp.down_proj"] == "int8_static"
    assert layers["model.layers.0.mlp.up_proj"] == "int8_dynamic"


def test_pattern_that_matches_nothing_names_itself_and_a_neighbour():
    with pytest.raises(PlanError, match=r"\*\.dwn_proj.*matches none.*layers\.\d\.mlp"):
        QuantPlan.from_config("bf16", {"*.dwn_proj": "bf16"}).resolve(NAMES)


@pytest.mark.parametrize("scheme", ["int9", None, 8])
def test_unknown_scheme_names_its_key(scheme):
    with pytest.raises(PlanError, match=r"plan\.default.*expected one of"):
        QuantPlan.from_config(scheme)
    with pytest.raises(PlanError, match=r"plan\.overrides\[\*\]: unknown"):
        QuantPlan.from_config("bf16", {"*": scheme})


@pytest.mark.parametrize("pattern", ["*.q_proj", "*.layers.2.mlp.gate_proj", "*.v_proj"])
def test_fused_group_must_agree(pattern):
    with pytest.raises(PlanError, match="share one scheme"):
        QuantPlan.from_config("int8_dynamic", {pattern: "bf16"}).resolve(NAMES)


def test_whole_group_may_differ_from_the_rest():
    layers = QuantPlan.from_config("int8_dynamic", {"*.[qkv]_proj": "int8_static"}).resolve(NAMES)
    assert layers["model.layers.2.self_attn.k_proj"] == "int8_static"
    assert layers["model.layers.2.self_attn.o_proj"] == "int8_dynamic"


def test_asking_for_a_protected_layer_is_an_error_but_a_wide_glob_is_not():
    with pytest.raises(PlanError, match="never quantized"):
        QuantPlan.from_config("bf16", {"lm_head": "int8_dynamic"}).resolve(NAMES)
    assert "lm_head" not in QuantPlan.from_config("bf16", {"*": "int8_dynamic"}).resolve(NAMES)
    assert QuantPlan.from_config("int8_dynamic", {"lm_head": "bf16"}).resolve(NAMES)


@pytest.mark.parametrize(
    ("name", "protected"),
    [
        ("lm_head", True),
        ("model.embed_tokens", True),
        ("model.layers.0.input_layernorm", True),
        ("model.layers.0.self_attn.q_norm", True),
        ("model.layers.0.mlp.gate", True),
        ("model.layers.0.block_sparse_moe.router", True),
        ("model.layers.0.mlp.gate_proj", False),
        ("model.layers.0.mlp.experts.3.down_proj", False),
    ],
)
def test_never_quantized(name, protected):
    assert never_quantized(name) is protected


def test_groups_stay_within_their_parent():
    assert group_of("a.self_attn.k_proj") == (
        "a.self_attn.q_proj",
        "a.self_attn.k_proj",
        "a.self_attn.v_proj",
    )
    assert group_of("a.mlp.down_proj") == ("a.mlp.down_proj",)
    assert group_of("up_proj") == ("gate_proj", "up_proj")


def test_override_all():
    plan = QuantPlan.from_config("int8_dynamic", {"*.down_proj": "int8_static"})
    assert set(plan.override_all("bf16").resolve(NAMES).values()) == {"bf16"}
