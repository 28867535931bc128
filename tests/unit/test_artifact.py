"""Artifacts: manifest round trip, hashes of every dtype, packing, and the disk format."""

import json

import pytest
import torch

from forge_ptq.artifact import (
    ArtifactError,
    Manifest,
    QuantizedArtifact,
    describe_tensor,
    hash_tensor,
)
from forge_ptq.numerics.schemes import get_scheme
from forge_ptq.store_packing import pack, unpack


def make_artifact(version: int = 3) -> QuantizedArtifact:
    generator = torch.Generator().manual_seed(version)
    layers = {"a.q_proj": "int8_static", "a.down_proj": "int8_dynamic", "a.o_proj": "bf16"}
    tensors = {"norm.weight": torch.randn(5, generator=generator).bfloat16()}
    for layer, scheme in layers.items():
        weight_NK = torch.randn(6, 8, generator=generator)
        for part, tensor in get_scheme(scheme).quantize(weight_NK, absmax=2.0).items():
            tensors[f"{layer}.{part}"] = tensor
    return QuantizedArtifact.build(
        policy_version=version, model="Toy", layers=layers, tensors=tensors, notes={"a": "b"}
    )


def test_a_fresh_artifact_verifies_and_its_id_is_unique():
    first, second = make_artifact(), make_artifact()
    first.verify()
    assert first.manifest.tensors == second.manifest.tensors
    assert first.manifest.artifact_id != second.manifest.artifact_id
    assert first.manifest.ref.policy_version == 3
    assert first.manifest.nbytes == 6 * 8 * (1 + 1 + 2) + 6 * 4 * 2 + 4 + 10


def test_manifest_round_trip_is_exact():
    manifest = make_artifact().manifest
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 1}', "null", "3"])
def test_what_is_not_a_manifest_is_refused(text):
    with pytest.raises(ArtifactError):
        Manifest.from_json(text)


def test_another_schema_version_is_refused():
    data = json.loads(make_artifact().manifest.to_json())
    data["schema_version"] = 99
    with pytest.raises(ArtifactError, match="99"):
        Manifest.from_json(json.dumps(data))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4)])
def test_hash_sees_bytes_not_layout(dtype, shape):
    tensor = (torch.arange(60).reshape(-1)[: int(torch.tensor(shape).prod())] + 1).to(dtype)
    tensor = tensor.reshape(shape)
    assert hash_tensor(tensor) == hash_tensor(tensor.clone())
    if tensor.dim() == 2 and tensor.numel():
        assert hash_tensor(tensor.t().contiguous().t()) == hash_tensor(tensor)
        assert hash_tensor(tensor.t()) != hash_tensor(tensor)
    if tensor.numel():
        assert hash_tensor(tensor + 1) != hash_tensor(tensor)


@pytest.mark.parametrize("chunk_bytes", [64, 100, 128, 1000, 10**6])
def test_packing_is_lossless_for_any_chunk_size(chunk_bytes):
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "odd": torch.randn(7, 13).bfloat16(),
        "codes": torch.randint(-127, 128, (33, 5), dtype=torch.int8),
        "view": torch.arange(40.0).reshape(5, 8).t(),
    }
    specs = {name: describe_tensor(tensor) for name, tensor in tensors.items()}
    index: dict[str, list[int]] = {}
    chunks = list(pack(tensors, chunk_bytes, index))
    assert all(chunk.dtype == torch.uint8 and chunk.numel() <= chunk_bytes for chunk in chunks)
    back = unpack(chunks, index, specs)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


def test_unpacking_truncated_chunks_names_the_tensor():
    tensors = {"first": torch.zeros(64), "last": torch.ones(64)}
    specs = {name: describe_tensor(tensor) for name, tensor in tensors.items()}
    index: dict[str, list[int]] = {}
    chunks = list(pack(tensors, 300, index))
    with pytest.raises(ArtifactError, match=r"last.*truncated"):
        unpack(chunks[:-1], index, specs)


def test_disk_round_trip(tmp_path):
    artifact = make_artifact()
    artifact.save(tmp_path / "art")
    loaded = QuantizedArtifact.load(tmp_path / "art")
    assert loaded.manifest == artifact.manifest
    assert all(torch.equal(loaded.tensors[n], t) for n, t in artifact.tensors.items())
    assert {p.name for p in (tmp_path / "art").iterdir()} == {
        "manifest.json",
        "tensors.safetensors",
    }


def test_saving_over_another_artifact_never_mixes_them(tmp_path):
    make_artifact(1).save(tmp_path)
    make_artifact(2).save(tmp_path)
    assert QuantizedArtifact.load(tmp_path).manifest.policy_version == 2


def test_without_a_manifest_a_directory_is_not_an_artifact(tmp_path):
    make_artifact().save(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        QuantizedArtifact.load(tmp_path)
