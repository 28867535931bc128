"""The store on real Monarch processes and TorchStore: round trips, completeness, retention."""

import asyncio
import os

import pytest
import pytest_asyncio
import torch

from forge_ptq import runtime, store, store_artifacts
from forge_ptq.artifact import ArtifactError, ArtifactRef, QuantizedArtifact
from forge_ptq.numerics.schemes import get_scheme
from forge_ptq.store import StoreError
from tests.integration.store_actors import Reader, ShardedTrainer, expected_sharded

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def running_store():
    await runtime.init_provisioner()
    await store.initialize()
    yield
    await store.shutdown()
    await runtime.shutdown()


def equal_states(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return sorted(got) == sorted(expected) and all(
        got[name].dtype == tensor.dtype and torch.equal(got[name], tensor)
        for name, tensor in expected.items()
    )


def odd_state() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "model.fp32.weight": base,
        "model.bf16.weight": base.bfloat16(),
        "model.int8.weight": base.to(torch.int8),
        "model.scalar": torch.tensor(2.5),
        "model.empty": torch.zeros(0, 3),
        "model.transposed": base.t(),
        "model.view_of_large": torch.arange(10**6).float()[5:9],
        "model.parameter": torch.nn.Parameter(base + 1),
    }


async def test_weights_of_every_kind_round_trip():
    await store.put_weights(1, odd_state())
    got = await store.get_weights(1)
    assert equal_states(got, {name: t.detach() for name, t in odd_state().items()})
    assert not any(tensor.requires_grad for tensor in got.values())


async def test_trainer_may_overwrite_its_tensors_once_put_has_returned():
    weight = torch.ones(1000, 1000)
    await store.put_weights(2, {"w": weight})
    weight.zero_()
    assert bool(((await store.get_weights(2))["w"] == 1).all())


async def test_a_reader_does_not_see_another_readers_changes():
    (await store.get_weights(2))["w"].zero_()
    assert bool(((await store.get_weights(2))["w"] == 1).all())


async def test_a_version_is_written_once():
    with pytest.raises(StoreError, match=r"policy_ver_0000000001.*already published"):
        await store.put_weights(1, {"w": torch.zeros(1)})


async def test_a_version_without_its_marker_does_not_exist_for_readers():
    from forge_ptq import store_io

    await store_io.put("policy_ver_0000000009.w", torch.zeros(2))
    with pytest.raises(StoreError, match="policy_ver_0000000009: not complete"):
        await store.get_weights(9)
    assert 9 not in await store.weight_versions()
    assert await store.drop_weights(9) == 1


async def test_missing_things_name_their_key():
    with pytest.raises(StoreError, match="policy_ver_0000000404"):
        await store.get_weights(404)
    with pytest.raises(StoreError, match=r"ptq_artifact\.nothing"):
        await store.get_artifact(ArtifactRef("nothing", 1))
    with pytest.raises(ValueError, match="policy version"):
        await store.get_weights(-1)


async def test_another_process_reads_and_writes():
    reader = await Reader.options(procs=1, mesh_name="reader").as_actor()
    assert equal_states(
        await reader.weights.call_one(1), {n: t.detach() for n, t in odd_state().items()}
    )
    assert await reader.put.call_one(3) != os.getpid()
    assert equal_states(await store.get_weights(3), {"w": torch.full((3,), 3.0)})
    ref = await store.put_artifact(make_artifact(3))
    assert (await reader.artifact.call_one(ref)).manifest.ref == ref
    await Reader.shutdown(reader)


@pytest.fixture
def travelled(monkeypatch) -> list[int]:
    """Bytes of each tensor that a volume sends, with all of the memory that comes along."""
    from torchstore.transport.pipe import Pipe

    seen: list[int] = []
    fetch = Pipe.get_from_storage_volume

    async def counted(pipe, key, request):
        found = await fetch(pipe, key, request)
        if isinstance(found, torch.Tensor):
            seen.append(found.untyped_storage().nbytes())
        return found

    monkeypatch.setattr(Pipe, "get_from_storage_volume", counted)
    return seen


async def assert_only_slices_travel(version, whole, slices, travelled):
    """Slices equal those of the whole, and the bytes that travel are just theirs."""
    travelled.clear()
    got = await store.get_weights(version, slices)
    assert list(got) == sorted(whole)
    expected = {name: whole[name][slices[name]] if name in slices else whole[name] for name in got}
    assert equal_states(got, expected)
    assert sum(travelled) == sum(t.numel() * t.element_size() for t in expected.values())


async def test_only_the_slices_wanted_of_whole_tensors_travel(travelled):
    whole = {name: tensor.detach() for name, tensor in odd_state().items()}
    slices = {
        "model.fp32.weight": (slice(1, 3), slice(0, 6)),
        "model.bf16.weight": (slice(0, 4), slice(2, 5)),
        "model.int8.weight": (slice(3, 4), slice(5, 6)),
        "model.transposed": (slice(0, 6), slice(0, 4)),
        "model.view_of_large": (slice(2, 2),),
        "model.parameter": (slice(2, 4), slice(1, 3)),
    }
    await assert_only_slices_travel(1, whole, slices, travelled)
    specs = await store.weight_specs(1)
    assert {name: (spec.shape, spec.dtype) for name, spec in specs.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in whole.items()
    }
    for wrong in ([slice(0, 5), slice(0, 6)], [slice(0, 4)], [slice(3, 2), slice(0, 6)]):
        with pytest.raises(ValueError, match=r"is not within model\.fp32\.weight \[4, 6\]"):
            await store.get_weights(1, {"model.fp32.weight": wrong})
    with pytest.raises(ValueError, match="no such tensor"):
        await store.get_weights(1, {"model.nothing": [slice(0, 1)]})


async def test_a_slice_of_another_shape_or_type_than_stored_is_refused():
    from forge_ptq import store_io

    key, part = (
        "policy_ver_0000000001.model.fp32.weight",
        {"offsets": (0, 0), "local_shape": (1, 1)},
    )
    with pytest.raises(StoreError, match=r"fp32\.weight: has shape \[4, 6\], expected \[6, 4\]"):
        await store_io.get_slice(key, **part, shape=(6, 4), dtype=torch.float32)
    with pytest.raises(StoreError, match=r"expected torch\.bfloat16"):
        await store_io.get_slice(key, **part, shape=(4, 6), dtype=torch.bfloat16)


async def test_two_ranks_put_shards_and_a_dead_rank_leaves_no_torn_version(travelled):
    trainer = await ShardedTrainer.options(procs=2, mesh_name="trainer").as_actor()
    await trainer.push.call(20)
    assert equal_states(await store.get_weights(20), expected_sharded())
    slices = {
        "even": (slice(1, 4), slice(0, 12)),  # across both shards
        "columns": (slice(2, 5), slice(3, 7)),
        "uneven": (slice(2, 3), slice(0, 3)),  # gathered before it was put
        "bf16": (slice(0, 8), slice(5, 6)),
        "replicated": (slice(4, 9),),  # lies there once per rank
    }
    await assert_only_slices_travel(20, expected_sharded(), slices, travelled)
    await trainer.push_then_train.call(21)
    assert equal_states(await store.get_weights(21), expected_sharded())
    for missing, version in ((1, 22), (0, 23)):
        await trainer.push.call(version, only_rank=1 - missing)
        with pytest.raises(StoreError, match=f"000{version}: not complete.*rank {missing}"):
            await store.get_weights(version)
        assert version not in await store.weight_versions()
        # TorchStore itself can neither read nor delete such a key.
        assert await store.drop_weights(version) == 3
    await trainer.push.call(23)
    assert equal_states(await store.get_weights(23), expected_sharded())
    await ShardedTrainer.shutdown(trainer)


async def test_versions_and_retention():
    assert await store.weight_versions() == [1, 2, 3, 20, 21, 23]
    for version in (20, 21, 23):
        assert await store.drop_weights(version) > 0
    assert await store.weight_versions() == [1, 2, 3]
    assert await store.drop_weights(20) == 0
    with pytest.raises(StoreError, match="dropped"):
        await store.get_weights(20)
    await store.put_weights(20, {"w": torch.ones(2)})
    assert equal_states(await store.get_weights(20), {"w": torch.ones(2)})


def make_artifact(version: int, rows: int = 6) -> QuantizedArtifact:
    parts = get_scheme("int8_static").quantize(torch.randn(rows, 8), absmax=1.0)
    tensors = {f"a.q_proj.{part}": tensor for part, tensor in parts.items()}
    tensors["norm.weight"] = torch.ones(8).bfloat16()
    return QuantizedArtifact.build(
        policy_version=version, model="Toy", layers={"a.q_proj": "int8_static"}, tensors=tensors
    )


async def test_artifact_round_trip_in_several_chunks(monkeypatch):
    monkeypatch.setattr(store_artifacts, "CHUNK_BYTES", 200)
    artifact = make_artifact(5, rows=64)
    ref = await store.put_artifact(artifact)
    got = await store.get_artifact(ref)
    assert got.manifest == artifact.manifest == await store.get_manifest(ref)
    assert equal_states(got.tensors, artifact.tensors)
    with pytest.raises(StoreError, match="exists"):
        await store.put_artifact(artifact)
    assert await store.drop_artifact(ref) == 6  # 5 chunks and the manifest
    with pytest.raises(StoreError, match=ref.artifact_id):
        await store.get_artifact(ref)


async def test_artifact_of_parts_from_several_writers(monkeypatch):
    monkeypatch.setattr(store_artifacts, "CHUNK_BYTES", 200)
    artifact = make_artifact(8, rows=32)
    manifest, names = artifact.manifest, list(artifact.tensors)
    shares = {"p1-a0": names[1:], "p0-a1": names[:1]}
    put, parts = store.put_artifact_part, []
    for name, held in shares.items():
        tensors = {tensor: artifact.tensors[tensor] for tensor in held}
        parts.append(await put(manifest.artifact_id, name, tensors))
    await put(manifest.artifact_id, "p0-a0", {"torn": torch.ones(3)})  # nobody names it
    with pytest.raises(StoreError, match="no such artifact"):
        await store.get_manifest(manifest.ref)
    with pytest.raises(ArtifactError, match="missing"):
        await store.finish_artifact(manifest, parts[:1])
    with pytest.raises(ArtifactError, match="more than one part"):
        await store.finish_artifact(manifest, [*parts, parts[0]])
    ref = await store.finish_artifact(manifest, parts)
    got = await store.get_artifact(ref)
    assert equal_states(got.tensors, artifact.tensors)
    with pytest.raises(StoreError, match="exists"):
        await store.finish_artifact(manifest, parts)
    await store.drop_artifact(ref)
    assert ref.artifact_id not in await store.artifact_ids()


async def test_a_damaged_chunk_is_refused_by_tensor_name():
    from forge_ptq import store_io

    artifact = make_artifact(6)
    ref = await store.put_artifact(artifact)
    key = f"ptq_artifact.{ref.artifact_id}.part_all.chunk_00000"
    chunk = await store_io.get(key)
    chunk[3] ^= 1
    await store_io.put(key, chunk)
    with pytest.raises(ArtifactError, match=r"^a\.q_proj\.weight: .*sha256"):
        await store.get_artifact(ref)
    await store_io.put(key, chunk[:70])
    with pytest.raises(ArtifactError, match="truncated"):
        await store.get_artifact(ref)


async def test_a_reference_with_the_wrong_version_is_refused():
    ref = await store.put_artifact(make_artifact(7))
    with pytest.raises(ArtifactError, match="policy_version=7"):
        await store.get_artifact(ArtifactRef(ref.artifact_id, 8))


async def test_committed_pointer():
    assert await store.get_committed() is None
    ref = ArtifactRef("some", 4)
    await store.set_committed(ref)
    assert await store.get_committed() == ref
    await store.set_committed(None)
    assert await store.get_committed() is None


async def test_a_store_cannot_be_started_twice():
    with pytest.raises(StoreError, match="already running"):
        await store.initialize()


async def test_concurrent_puts_and_gets_do_not_mix():
    async def one(version: int) -> bool:
        state = {f"w{i}": torch.full((50, 50), float(version * 100 + i)) for i in range(10)}
        await store.put_weights(version, state)
        return equal_states(await store.get_weights(version), state)

    assert all(await asyncio.gather(*(one(version) for version in range(50, 56))))
