"""The only module that knows TorchStore: keys, completeness, packing, retention, deadlines.

Keys (TorchStore splits them at dots):

- ``policy_ver_{v:010d}.{hf name}``: one tensor of policy version v, a plain tensor or the shards of
  a DTensor; ``policy_ver_{v:010d}.__complete__.{rank}``: put by each writing rank after its
  last tensor. A version exists for readers once every rank's marker is there.
- ``ptq_artifact.{id}.chunk_{i:05d}``: an artifact's tensors packed into flat uint8 chunks of at
  most CHUNK_BYTES (a small key costs as much as a megabyte); ``ptq_artifact.{id}.manifest``: its
  manifest and the index into the chunks, put last.
- ``ptq_committed``: the artifact that generators serve, put last of all.

Readers therefore never see a torn version: they see all of it or StoreError. Versions and
artifacts are written once, under fresh keys; overwriting a key of a DTensor would mix versions.

Every call has a deadline (see store_io). A put has reached the volume when it returns: the caller
may overwrite its tensors from then on.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from forge_ptq import store_io as io
from forge_ptq.artifact import (
    ArtifactError,
    ArtifactRef,
    Manifest,
    QuantizedArtifact,
    verify_names,
)
from forge_ptq.store_io import StoreError, StoreNotRunning
from forge_ptq.store_packing import Index, pack, unpack

__all__ = [
    "StoreError",
    "StoreNotRunning",
    "artifact_ids",
    "drop_artifact",
    "drop_weights",
    "get_artifact",
    "get_committed",
    "get_manifest",
    "get_weights",
    "initialize",
    "put_artifact",
    "put_weights",
    "set_committed",
    "shutdown",
    "weight_prefix",
    "weight_versions",
]

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 2**20

_MARKER = "__complete__"
_COMMITTED = "ptq_committed"
_ARTIFACT = "ptq_artifact"
_mesh: Any = None


async def initialize(num_storage_volumes: int = 1) -> None:
    """Start the store's processes. Call once, in the client, before anyone puts or gets."""
    global _mesh
    if num_storage_volumes < 1:
        raise ValueError(f"num_storage_volumes must be at least 1, got {num_storage_volumes}")
    if _mesh is not None:
        raise StoreError("initialize: the store is already running in this client")
    torchstore = io.ts()
    from forge_ptq import runtime
    from forge_ptq.store_controller import SpreadStrategy

    config = runtime.ProcessConfig(procs=num_storage_volumes, mesh_name="store")
    mesh = await io.within("initialize", runtime.get_proc_mesh(config))
    torchstore.reset_client()
    strategy = None if num_storage_volumes == 1 else SpreadStrategy()
    start = torchstore.initialize(num_storage_volumes, strategy=strategy, mesh=mesh)
    await io.within("initialize", start)
    _mesh = mesh


async def shutdown() -> None:
    """Drop everything stored and end the store's processes; does nothing if there are none.

    A store whose processes have died is forgotten with a warning.
    """
    global _mesh
    if _mesh is None:
        return
    torchstore, mesh, _mesh = io.ts(), _mesh, None
    try:
        await io.within("shutdown", torchstore.shutdown())
        await io.within("shutdown", mesh.stop())
    except StoreError as error:
        log.warning("the store did not shut down in order: %s", error)
    torchstore.reset_client()


def weight_prefix(version: int) -> str:
    """Key prefix of a policy version (torchforge's scheme)."""
    if not 0 <= version < 10**10:
        raise ValueError(f"policy version must be within 0 and 10^10, got {version}")
    return f"policy_ver_{version:010d}"


async def put_weights(
    version: int,
    state: Mapping[str, torch.Tensor],
    *,
    rank: int | None = None,
    world_size: int | None = None,
) -> None:
    """Publish a policy version under HF names; every writing rank calls this with its share.

    state holds plain tensors, or DTensors of which each rank puts its local shard. The version is
    complete once all world_size ranks have returned; rank and world_size default to those of
    torch.distributed when state holds DTensors, else to a single writer. DTensors that TorchStore
    cannot keep as shards (uneven or strided ones, partial sums) are gathered first, which is
    collective. Raises StoreError, also for a version that this rank has already put.
    """
    from forge_ptq.store_tensors import writers

    if not state:
        raise ValueError(f"put_weights({version}): no tensors")
    rank, world = writers(state, rank, world_size)
    prefix = weight_prefix(version)
    marker = f"{prefix}.{_MARKER}.{rank:05d}"
    if await io.exists(marker):
        raise StoreError(f"put {prefix}: rank {rank} has already published this version")
    names = sorted(state)

    for name in names:
        await io.put_tensor(f"{prefix}.{name}", state[name], rank)
    sizes = {name: state[name].numel() * state[name].element_size() for name in names}
    await io.put(marker, json.dumps({"sizes": sizes, "world_size": world}))


async def _sizes(version: int) -> dict[str, int]:
    """{HF name: bytes} of a version; StoreError unless every rank has put its marker."""
    prefix = weight_prefix(version)
    sizes: dict[str, int] = {}
    rank, world = 0, 1
    while rank < world:
        marker = f"{prefix}.{_MARKER}.{rank:05d}"
        if not await io.exists(marker):
            raise StoreError(f"get {prefix}: not complete or dropped (no marker of rank {rank})")
        record = json.loads(await io.get(marker))
        sizes.update(record["sizes"])
        rank, world = rank + 1, record["world_size"]
    return sizes


async def get_weights(version: int) -> dict[str, torch.Tensor]:
    """All tensors of a complete policy version, whole, by HF name, in sorted order.

    Raises StoreError naming the version if it is not complete, was dropped, or the store is gone.
    """
    prefix = weight_prefix(version)
    sizes = await _sizes(version)
    names = sorted(sizes)
    tensors = await io.gather(partial(io.get, f"{prefix}.{name}", sizes[name]) for name in names)
    return dict(zip(names, tensors, strict=True))


async def weight_versions() -> list[int]:
    """Complete policy versions, ascending."""
    last = f".{_MARKER}.{0:05d}"
    keys = await io.keys()
    versions = [
        int(key.removeprefix("policy_ver_").removesuffix(last))
        for key in keys
        if key.startswith("policy_ver_") and key.endswith(last)
    ]
    complete = []
    for version in sorted(versions):
        markers = await io.keys(f"{weight_prefix(version)}.{_MARKER}")
        world = json.loads(await io.get(f"{weight_prefix(version)}{last}"))["world_size"]
        if len(markers) == world:
            complete.append(version)
    return complete


async def drop_weights(version: int) -> int:
    """Delete a policy version, complete or not; returns how many keys it had."""
    return await io.purge(await io.keys(weight_prefix(version)))


async def put_artifact(artifact: QuantizedArtifact) -> ArtifactRef:
    """Store an artifact; it exists for readers once this returns."""
    manifest = artifact.manifest
    prefix = f"{_ARTIFACT}.{manifest.artifact_id}"
    if "." in manifest.artifact_id:
        raise ValueError(f"artifact_id must not contain dots: {manifest.artifact_id!r}")
    if await io.exists(f"{prefix}.manifest"):
        raise StoreError(f"put {prefix}: an artifact with this id exists")
    index: Index = {}
    count = 0
    for chunk in pack(artifact.tensors, CHUNK_BYTES, index):
        await io.put(f"{prefix}.chunk_{count:05d}", chunk, chunk.numel())
        count += 1
    record = {"manifest": manifest.to_json(), "index": index, "chunks": count}
    await io.put(f"{prefix}.manifest", json.dumps(record))
    return manifest.ref


async def _artifact_record(ref: ArtifactRef) -> tuple[Manifest, dict[str, Any]]:
    key = f"{_ARTIFACT}.{ref.artifact_id}.manifest"
    if not await io.exists(key):
        raise StoreError(f"get {key}: no such artifact, not complete or dropped")
    record = json.loads(await io.get(key))
    manifest = Manifest.from_json(record["manifest"])
    if manifest.ref != ref:
        raise ArtifactError(f"{key} is the manifest of {manifest.ref}, expected {ref}")
    return manifest, record


async def get_manifest(ref: ArtifactRef) -> Manifest:
    """The manifest alone, a few kilobytes."""
    return (await _artifact_record(ref))[0]


async def get_artifact(ref: ArtifactRef) -> QuantizedArtifact:
    """Load and verify an artifact.

    Raises StoreError if it is not there, ArtifactError naming the tensor if it is damaged.
    """
    manifest, record = await _artifact_record(ref)
    index = record["index"]
    verify_names(manifest, index)
    chunks = []
    for number in range(record["chunks"]):
        key = f"{_ARTIFACT}.{ref.artifact_id}.chunk_{number:05d}"
        chunks.append(await io.get(key, CHUNK_BYTES))

    def assemble() -> QuantizedArtifact:
        artifact = QuantizedArtifact(manifest, unpack(chunks, index, manifest.tensors))
        artifact.verify()
        return artifact

    return await asyncio.to_thread(assemble)


async def artifact_ids() -> list[str]:
    """Ids of all stored artifacts, of incomplete ones too, sorted."""
    return sorted({key.split(".")[1] for key in await io.keys(_ARTIFACT)})


async def drop_artifact(artifact: ArtifactRef | str) -> int:
    """Delete an artifact (by reference or id), complete or not; returns how many keys it had."""
    artifact_id = artifact if isinstance(artifact, str) else artifact.artifact_id
    return await io.purge(await io.keys(f"{_ARTIFACT}.{artifact_id}"))


async def set_committed(ref: ArtifactRef | None) -> None:
    """Make ref the artifact that a restarting generator serves; None: none is."""
    value = None if ref is None else [ref.artifact_id, ref.policy_version]
    await io.put(_COMMITTED, json.dumps(value))


async def get_committed() -> ArtifactRef | None:
    """The artifact last given to ``set_committed``; None if none has been."""
    if not await io.exists(_COMMITTED):
        return None
    value = json.loads(await io.get(_COMMITTED))
    return None if value is None else ArtifactRef(str(value[0]), int(value[1]))
