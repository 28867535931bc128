"""Policy versions in TorchStore, and the door to everything else that is kept there.

Only the modules store*.py know TorchStore. Keys (TorchStore splits them at dots):

- ``policy_ver_{v:010d}.{hf name}``: one tensor of policy version v, a plain tensor or the shards of
  a DTensor; ``policy_ver_{v:010d}.__complete__.{rank}``: put by each writing rank after its
  last tensor. A version exists for readers once every rank's marker is there.
- ``ptq_artifact.{id}``, ``ptq_committed``: artifacts and the one that serves (store_artifacts).
- ``ptq_stats``, ``ptq_merged``, ``ptq_calibration``: what calibrations measure (store_stats).

Readers therefore never see a torn version: they see all of it or StoreError. Versions and
artifacts are written once, under fresh keys; overwriting a key of a DTensor would mix versions.

Every call has a deadline (see store_io). A put has reached the volume when it returns: the caller
may overwrite its tensors from then on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from forge_ptq import store_io as io
from forge_ptq.store_artifacts import (
    ArtifactPart,
    artifact_ids,
    drop_artifact,
    finish_artifact,
    get_artifact,
    get_committed,
    get_manifest,
    put_artifact,
    put_artifact_part,
    set_committed,
)
from forge_ptq.store_io import StoreError, StoreNotRunning
from forge_ptq.store_tensors import StoredTensor, writers

__all__ = [
    "ArtifactPart",
    "StoreError",
    "StoreNotRunning",
    "artifact_ids",
    "drop_artifact",
    "drop_weights",
    "finish_artifact",
    "get_artifact",
    "get_committed",
    "get_manifest",
    "get_weights",
    "initialize",
    "prepare",
    "put_artifact",
    "put_artifact_part",
    "put_weights",
    "set_committed",
    "shutdown",
    "weight_prefix",
    "weight_specs",
    "weight_versions",
]

log = logging.getLogger(__name__)

_MARKER = "__complete__"
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


def prepare() -> None:
    """Import what the store needs, which takes seconds. For processes that must not pause later."""
    io.ts()


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
    tensors = {name: StoredTensor.of(state[name]).record() for name in names}
    await io.put(marker, json.dumps({"tensors": tensors, "world_size": world}))


async def weight_specs(version: int) -> dict[str, StoredTensor]:
    """Dtype and whole shape of each tensor of a complete policy version, by HF name, sorted.

    Raises StoreError naming the version if it is not complete, was dropped, or the store is gone.
    """
    prefix = weight_prefix(version)
    found: dict[str, StoredTensor] = {}
    rank, world = 0, 1
    while rank < world:
        marker = f"{prefix}.{_MARKER}.{rank:05d}"
        if not await io.exists(marker):
            raise StoreError(f"get {prefix}: not complete or dropped (no marker of rank {rank})")
        record = json.loads(await io.get(marker))
        for name, each in record["tensors"].items():
            found[name] = StoredTensor.from_record(each)
        rank, world = rank + 1, record["world_size"]
    return dict(sorted(found.items()))


async def get_weights(
    version: int, slices: Mapping[str, Sequence[slice]] | None = None
) -> dict[str, torch.Tensor]:
    """All tensors of a complete policy version by HF name, in sorted order.

    slices: {name: one slice [start:stop] per dimension}, for tensors of which only that part is
    wanted; only its bytes travel, whether the version was put whole or in shards. Tensors not named
    come whole. Raises StoreError like ``weight_specs``, and ValueError for a slice that does not
    lie within its tensor.
    """
    prefix = weight_prefix(version)
    specs = await weight_specs(version)
    for name, where in (slices or {}).items():
        if name not in specs:
            raise ValueError(f"get {prefix}: a slice of {name} is wanted, it has no such tensor")
        shape = specs[name].shape
        if len(where) != len(shape) or not all(
            part.step in (None, 1) and 0 <= part.start <= part.stop <= size
            for part, size in zip(where, shape, strict=True)
        ):
            raise ValueError(f"get {prefix}: {list(where)} is not within {name} {list(shape)}")

    def fetch(name: str, spec: StoredTensor) -> Callable[[], Awaitable[torch.Tensor]]:
        key = f"{prefix}.{name}"
        if slices is None or name not in slices:
            return partial(io.get, key, spec.nbytes)
        return partial(
            io.get_slice,
            key,
            offsets=[part.start for part in slices[name]],
            local_shape=[part.stop - part.start for part in slices[name]],
            shape=spec.shape,
            dtype=spec.dtype,
        )

    tensors = await io.gather(fetch(name, spec) for name, spec in specs.items())
    return dict(zip(specs, tensors, strict=True))


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
