"""Every way an artifact can be damaged is refused, and the message names the tensor."""

import dataclasses
import math

import pytest
import torch

from forge_ptq.artifact import ArtifactError, QuantizedArtifact
from forge_ptq.numerics.schemes import get_scheme

LAYERS = {"x.q_proj": "int8_static", "x.down_proj": "int8_dynamic", "x.o_proj": "bf16"}


def build(layers=LAYERS, **changes) -> QuantizedArtifact:
    """A sound artifact with tensors replaced (None: left out) before it is hashed."""
    tensors = {"norm.weight": torch.ones(8).bfloat16()}
    for layer, scheme in LAYERS.items():
        parts = get_scheme(scheme).quantize(torch.randn(4, 8), absmax=1.0)
        tensors |= {f"{layer}.{part}": tensor for part, tensor in parts.items()}
    tensors |= {k: v for k, v in changes.items() if v is not None}
    tensors = {k: v for k, v in tensors.items() if k not in changes or changes[k] is not None}
    return QuantizedArtifact.build(policy_version=1, model="m", layers=layers, tensors=tensors)


def with_tensors(artifact: QuantizedArtifact, **tensors) -> QuantizedArtifact:
    """The same manifest with other tensors: damage after hashing."""
    kept = {**artifact.tensors, **tensors}
    return QuantizedArtifact(artifact.manifest, {k: v for k, v in kept.items() if v is not None})


def refused(artifact: QuantizedArtifact, match: str) -> None:
    with pytest.raises(ArtifactError, match=match):
        artifact.verify()


def test_the_undamaged_one_passes():
    build().verify()


@pytest.mark.parametrize("name", sorted(build().tensors))
def test_one_flipped_bit_in_any_tensor(name):
    artifact = build()
    flipped = artifact.tensors[name].clone()
    flipped.reshape(-1).view(torch.uint8)[0] ^= 1
    refused(with_tensors(artifact, **{name: flipped}), f"^{name}: .*sha256")


@pytest.mark.parametrize("name", sorted(build().tensors))
def test_any_missing_tensor(name):
    refused(with_tensors(build(), **{name: None}), f"^{name}: missing")


def test_extra_tensor():
    refused(with_tensors(build(), stray=torch.ones(1)), r"^stray: not in the manifest")


@pytest.mark.parametrize("name", sorted(build().tensors))
def test_wrong_shape_or_dtype_against_the_manifest(name):
    artifact = build()
    tensor = artifact.tensors[name]
    refused(with_tensors(artifact, **{name: tensor[:-1]}), f"^{name}: expected shape")
    refused(with_tensors(artifact, **{name: tensor.to(torch.float64)}), f"^{name}: expected dtype")


@pytest.mark.parametrize("value", [0.0, -0.01, math.inf, math.nan])
@pytest.mark.parametrize(
    "name", ["x.q_proj.weight_scale", "x.q_proj.input_scale", "x.down_proj.weight_scale"]
)
def test_unusable_scale_though_consistently_hashed(name, value):
    scale = build().tensors[name].clone()
    scale.reshape(-1)[-1] = value
    refused(build(**{name: scale}), f"^{name}: (scales must be positive|holds NaN or infinite)")


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_non_finite_full_precision_tensor(value):
    refused(build(**{"norm.weight": torch.full((8,), value).bfloat16()}), "^norm.weight: holds NaN")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"x.q_proj.input_scale": None}, r"^x\.q_proj\.input_scale: missing.*int8_static"),
        ({"x.q_proj.weight_scale": None}, r"^x\.q_proj\.weight_scale: missing"),
        ({"x.q_proj.weight": torch.ones(4, 8)}, r"^x\.q_proj\.weight: .*int8, got float32"),
        ({"x.o_proj.weight": torch.ones(4, 8)}, r"^x\.o_proj\.weight: .*bfloat16, got float32"),
        ({"x.q_proj.weight_scale": torch.ones(4)}, r"weight_scale: expected shape \[4, 1\]"),
        ({"x.q_proj.weight_scale": torch.ones(3, 1)}, r"weight_scale: expected shape \[4, 1\]"),
        ({"x.q_proj.input_scale": torch.ones(2)}, r"input_scale: expected shape \[1\]"),
        ({"x.o_proj.weight_scale": torch.ones(4, 1)}, r"^x\.o_proj\.weight_scale: a scale"),
        ({"norm.weight": torch.ones(8)}, r"^norm\.weight: .*bf16, got float32"),
        ({"x.o_proj.weight": torch.ones(8).bfloat16()}, r"expected shape \[N, K\]"),
    ],
)
def test_parts_that_do_not_fit_the_scheme(changes, match):
    refused(build(**changes), match)


def test_layer_with_an_unknown_scheme():
    refused(build(layers={**LAYERS, "x.o_proj": "int3"}), r"^x\.o_proj: unknown scheme")


def test_manifest_of_another_artifact():
    first, second = build(), build()
    with pytest.raises(ArtifactError, match="sha256"):
        QuantizedArtifact(first.manifest, second.tensors).verify()


def test_unsupported_dtype_in_the_manifest():
    artifact = build()
    spec = dataclasses.replace(artifact.manifest.tensors["norm.weight"], dtype="float0")
    tensors = {**artifact.manifest.tensors, "norm.weight": spec}
    manifest = dataclasses.replace(artifact.manifest, tensors=tensors)
    refused(QuantizedArtifact(manifest, artifact.tensors), "float0")


def test_truncated_file_on_disk(tmp_path):
    path = build().save(tmp_path) / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ArtifactError, match=r"tensors\.safetensors cannot be read"):
        QuantizedArtifact.load(tmp_path)


def test_flipped_bit_on_disk(tmp_path):
    path = build().save(tmp_path) / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x10
    path.write_bytes(bytes(data))
    with pytest.raises(ArtifactError):
        QuantizedArtifact.load(tmp_path)


def test_crash_before_the_manifest_leaves_no_artifact(tmp_path, monkeypatch):
    import os

    build().save(tmp_path)
    real, calls = os.replace, []

    def die_at_second(src, dst):
        calls.append(dst)
        if len(calls) == 2:
            raise OSError("disk full")
        real(src, dst)

    monkeypatch.setattr("forge_ptq.artifact.os.replace", die_at_second)
    with pytest.raises(OSError, match="disk full"):
        build().save(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ArtifactError, match="not complete"):
        QuantizedArtifact.load(tmp_path)
