"""Artifacts in the store, whole or made of parts by several replicas, and which one serves.

- ``ptq_artifact.{id}.part_{name}.chunk_{i:05d}``: some of its tensors, packed into flat uint8
  chunks of at most CHUNK_BYTES (a small key costs as much as a megabyte);
- ``ptq_artifact.{id}.manifest``: its manifest and the index into the parts, put last;
- ``ptq_committed``: the artifact that generators serve.

Parts that no manifest names (of a replica that died, or that came second) are garbage, which goes
with ``drop_artifact``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
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
from forge_ptq.store_io import StoreError
from forge_ptq.store_packing import Index, pack, unpack

CHUNK_BYTES = 256 * 2**20

_COMMITTED = "ptq_committed"
_ARTIFACT = "ptq_artifact"


@dataclass(frozen=True)
class ArtifactPart:
    """Where some tensors of an artifact lie."""

    name: str
    index: Index
    """Tensor -> [offset, nbytes] in the part's byte stream."""
    chunks: int


async def put_artifact_part(
    artifact_id: str, name: str, tensors: Mapping[str, torch.Tensor]
) -> ArtifactPart:
    """Store some tensors of an artifact; nobody sees them before ``finish_artifact``.

    name: unique within the artifact, for every attempt at the part; without dots.
    """
    if "." in artifact_id or "." in name:
        raise ValueError(f"ids must not contain dots: artifact {artifact_id!r}, part {name!r}")
    index: Index = {}
    count = 0
    for chunk in pack(tensors, CHUNK_BYTES, index):
        await io.put(_chunk(artifact_id, name, count), chunk, chunk.numel())
        count += 1
    return ArtifactPart(name, index, count)


async def finish_artifact(manifest: Manifest, parts: Iterable[ArtifactPart]) -> ArtifactRef:
    """Make an artifact of parts that are all stored; it exists for readers once this returns.

    ArtifactError unless the parts hold exactly the manifest's tensors, each once.
    """
    parts = list(parts)
    prefix = f"{_ARTIFACT}.{manifest.artifact_id}"
    if await io.exists(f"{prefix}.manifest"):
        raise StoreError(f"put {prefix}: an artifact with this id exists")
    held = [name for part in parts for name in part.index]
    verify_names(manifest, dict.fromkeys(held))
    if len(set(held)) != len(held):
        twice = sorted(name for name in set(held) if held.count(name) > 1)
        raise ArtifactError(f"{twice[0]}: in more than one part of {manifest.artifact_id}")
    record = {"manifest": manifest.to_json(), "parts": [asdict(part) for part in parts]}
    await io.put(f"{prefix}.manifest", json.dumps(record))
    return manifest.ref


def _chunk(artifact_id: str, part: str, number: int) -> str:
    return f"{_ARTIFACT}.{artifact_id}.part_{part}.chunk_{number:05d}"


async def put_artifact(artifact: QuantizedArtifact) -> ArtifactRef:
    """Store an artifact; it exists for readers once this returns."""
    manifest = artifact.manifest
    if "." in manifest.artifact_id:
        raise ValueError(f"artifact_id must not contain dots: {manifest.artifact_id!r}")
    if await io.exists(f"{_ARTIFACT}.{manifest.artifact_id}.manifest"):
        raise StoreError(f"put {_ARTIFACT}.{manifest.artifact_id}: an artifact with this id exists")
    part = await put_artifact_part(manifest.artifact_id, "all", artifact.tensors)
    return await finish_artifact(manifest, [part])


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
    parts = [ArtifactPart(**part) for part in record["parts"]]
    verify_names(manifest, {name: part for part in parts for name in part.index})
    tensors: dict[str, torch.Tensor] = {}
    for part in parts:
        chunks = []
        for number in range(part.chunks):
            key = _chunk(ref.artifact_id, part.name, number)
            chunks.append(await io.get(key, CHUNK_BYTES))
        tensors |= await asyncio.to_thread(unpack, chunks, part.index, manifest.tensors)
    artifact = QuantizedArtifact(manifest, {name: tensors[name] for name in manifest.tensors})
    await asyncio.to_thread(artifact.verify)
    return artifact


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
