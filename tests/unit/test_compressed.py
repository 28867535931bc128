"""compressed-tensors checkpoints: round trip, what transformers makes of them, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_ptq import compressed
from forge_ptq.artifact import ArtifactError, CalibrationRecord, QuantizedArtifact
from forge_ptq.compressed import load_compressed, quantization_config, save_compressed
from forge_ptq.numerics.plan import QuantPlan
from forge_ptq.numerics.schemes import get_scheme

MIXED = {"*.[qkv]_proj": "int8_static", "*.down_proj": "bf16"}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 33,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "torch_dtype": "float32",
}
SHAPES = {"q": (24, 24), "k": (12, 24), "v": (12, 24), "o": (24, 24)}
SHAPES |= {"gate": (40, 24), "up": (40, 24), "down": (24, 40)}


def make(
    source: Path, default: str = "int8_dynamic", overrides: dict[str, str] | None = None
) -> QuantizedArtifact:
    """A one-layer Llama: its source folder, and an artifact of it."""
    generator = torch.Generator().manual_seed(0)
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    (source / "tokenizer.json").write_text("{}")
    (source / "manifest.json").write_text("somebody else's")
    state = {
        f"model.layers.0.{'mlp' if leaf in ('gate', 'up', 'down') else 'self_attn'}.{leaf}_proj": (
            torch.randn(shape, generator=generator) * 0.2
        )
        for leaf, shape in SHAPES.items()
    }
    layers = QuantPlan.from_config(default, MIXED if overrides is None else overrides).resolve(
        [*state, "lm_head"]
    )
    tensors = {
        f"model.{name}.weight": torch.rand(24, generator=generator).bfloat16()
        for name in ("norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm")
    }
    for name in ("lm_head", "model.embed_tokens"):
        tensors[f"{name}.weight"] = torch.randn(33, 24, generator=generator).bfloat16()
    for name, scheme in layers.items():
        parts = get_scheme(scheme).quantize(state[name], name=name, absmax=3.0)
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    record = CalibrationRecord(round=0, policy_version=2, tokens=100)
    return QuantizedArtifact.build(
        policy_version=2,
        model="LlamaForCausalLM",
        layers=layers,
        tensors=tensors,
        calibration=record,
    )


@pytest.fixture
def saved(tmp_path: Path) -> tuple[QuantizedArtifact, Path]:
    artifact = make(tmp_path / "source")
    out = tmp_path / "out"
    out.mkdir()
    return artifact, save_compressed(artifact, tmp_path / "source", out)


def test_round_trip_is_exact(saved: tuple[QuantizedArtifact, Path]) -> None:
    artifact, folder = saved
    back = load_compressed(folder)
    assert back.manifest == artifact.manifest
    assert all(torch.equal(back.tensors[name], t) for name, t in artifact.tensors.items())
    assert list(back.manifest.layers) == list(artifact.manifest.layers)
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    assert (folder / "tokenizer.json").is_file()
    config = json.loads((folder / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("default", ["int8_static", "int8_dynamic", "bf16"])
def test_round_trip_of_a_uniform_plan(default: str, tmp_path: Path) -> None:
    artifact = make(tmp_path / "source", default, {})
    (tmp_path / "out").mkdir()
    folder = save_compressed(artifact, tmp_path / "source", tmp_path / "out")
    assert load_compressed(folder).manifest == artifact.manifest
    config = json.loads((folder / "config.json").read_text())
    assert ("quantization_config" in config) == (default != "bf16")


def test_a_large_checkpoint_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "SHARD_BYTES", 3000)
    artifact = make(tmp_path / "source")
    (tmp_path / "out").mkdir()
    folder = save_compressed(artifact, tmp_path / "source", tmp_path / "out")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert load_compressed(folder).manifest == artifact.manifest


def test_every_layer_is_in_exactly_one_list() -> None:
    layers = {"a.q_proj": "int8_static", "a.o_proj": "int8_dynamic", "a.down_proj": "bf16"}
    config = quantization_config(layers)
    assert config is not None
    groups = config["config_groups"]
    targets = [name for group in groups.values() for name in group["targets"]]
    assert sorted([*targets, *config["ignore"]]) == sorted([*layers, "lm_head"])
    assert [g["input_activations"]["strategy"] for g in groups.values()] == ["tensor", "token"]
    assert [g["input_activations"]["dynamic"] for g in groups.values()] == [False, True]
    assert all(g["weights"]["strategy"] == "channel" for g in groups.values())


def test_transformers_reads_the_same_weights(saved: tuple[QuantizedArtifact, Path]) -> None:
    """Another reader of the format, of which we use nothing: it decompresses to codes * scale."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    artifact, folder = saved
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    state = model.state_dict()
    for name, scheme in artifact.manifest.layers.items():
        parts = get_scheme(scheme).PARTS
        w_NK = get_scheme(scheme).dequantize({p: artifact.tensors[f"{name}.{p}"] for p in parts})
        assert torch.equal(state[f"{name}.weight"], w_NK), name
    assert torch.equal(state["lm_head.weight"], artifact.tensors["lm_head.weight"].float())


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the quantization_config of a folder."""
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def test_a_checkpoint_of_others_is_read(saved: tuple[QuantizedArtifact, Path]) -> None:
    """No manifest, targets by class and pattern, narrow scales of other shapes."""
    artifact, folder = saved
    (folder / "manifest.json").unlink()

    def generic(config: dict[str, Any]) -> None:
        config["config_groups"]["group_0"]["targets"] = [r"re:.*self_attn\.[qkv]_proj$"]
        config["config_groups"]["group_1"]["targets"] = ["Linear"]
        config["ignore"] = [r"re:.*down_proj", "lm_head"]

    edit(folder, generic)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("weight_scale"):
            tensors[name] = tensor.to(torch.bfloat16).reshape(-1)
        elif name.endswith("input_scale"):
            tensors[name] = tensor.reshape(())
    save_file(tensors, folder / "model.safetensors")
    back = load_compressed(folder)
    assert dict(back.manifest.layers) == artifact.manifest.layers
    assert back.manifest.calibration is None
    scale = back.tensors["model.layers.0.mlp.up_proj.weight_scale"]
    narrow = artifact.tensors["model.layers.0.mlp.up_proj.weight_scale"].bfloat16().float()
    assert torch.equal(scale, narrow)


REFUSED: list[tuple[Callable[[dict[str, Any]], object], str | None]] = [
    (lambda c: c.update(quant_method="gptq"), "quant_method is 'gptq'"),
    (lambda c: c["config_groups"]["group_0"]["weights"].update(num_bits=4), "num_bits=4"),
    (lambda c: c["config_groups"]["group_0"]["weights"].update(symmetric=False), "group_0"),
    (lambda c: c["config_groups"]["group_1"].update(input_activations=None), "none"),
    (lambda c: c["config_groups"]["group_1"].update(colour=1), "colour"),
    (lambda c: c["config_groups"]["group_0"]["targets"].pop(), r"v_proj.*manifest\.json says"),
    (lambda c: c["ignore"].remove("model.layers.0.mlp.down_proj"), None),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_config_that_says_something_else(
    saved: tuple[QuantizedArtifact, Path],
    change: Callable[[dict[str, Any]], object],
    message: str | None,
) -> None:
    artifact, folder = saved
    edit(folder, change)
    if message is None:  # bf16 either way
        assert load_compressed(folder).manifest == artifact.manifest
        return
    with pytest.raises(ArtifactError, match=message):
        load_compressed(folder)


def test_a_damaged_tensor_is_named(saved: tuple[QuantizedArtifact, Path]) -> None:
    folder = saved[1]
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 3] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"up_proj\.weight: its bytes"):
        load_compressed(folder)


def test_a_truncated_file_is_refused(saved: tuple[QuantizedArtifact, Path]) -> None:
    file = saved[1] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_compressed(saved[1])


def test_fused_layers_must_agree(tmp_path: Path) -> None:
    artifact = make(tmp_path / "source")
    (tmp_path / "out").mkdir()
    k = "model.layers.0.self_attn.k_proj"
    other = QuantizedArtifact(
        artifact.manifest, {**artifact.tensors, f"{k}.input_scale": torch.tensor([0.7])}
    )
    with pytest.raises(ArtifactError, match=r"k_proj\.input_scale is 0\.7.*share one input"):
        save_compressed(other, tmp_path / "source", tmp_path / "out")
    layers = {**artifact.manifest.layers, k: "int8_dynamic"}
    tensors = {n: t for n, t in artifact.tensors.items() if n != f"{k}.input_scale"}
    mixed = QuantizedArtifact.build(policy_version=1, model="x", layers=layers, tensors=tensors)
    mixed.verify()
    with pytest.raises(ArtifactError, match=r"k_proj is int8_dynamic.*q_proj is int8_static"):
        save_compressed(mixed, tmp_path / "source", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_quantized_source_is_refused(
    saved: tuple[QuantizedArtifact, Path], tmp_path: Path
) -> None:
    (tmp_path / "again").mkdir()
    with pytest.raises(ArtifactError, match="quantized already"):
        save_compressed(saved[0], saved[1], tmp_path / "again")
