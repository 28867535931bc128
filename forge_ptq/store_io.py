"""Single operations on TorchStore, each with a deadline and with errors that name the key.

Every call may take BASE_TIMEOUT_S (environment variable FORGE_PTQ_STORE_TIMEOUT_S) plus what its
bytes take at SLOWEST_BYTES_PER_S. Whatever goes wrong, a silent store included, is a StoreError.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from forge_ptq.store_tensors import compact, keeps_shards

# Large messages need it; torchstore would set it too, with a warning on the console and a handler
# on the root logger.
os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "910737418240")

T = TypeVar("T")

BASE_TIMEOUT_S = float(os.environ.get("FORGE_PTQ_STORE_TIMEOUT_S", "30"))
SLOWEST_BYTES_PER_S = 20e6
CONCURRENCY = 8
"""Keys in flight at once within one ``gather``."""


class StoreError(RuntimeError):
    """A store operation that failed, timed out or found nothing; names the key."""


class StoreNotRunning(StoreError):
    """No store has been started for this process."""


def ts() -> Any:
    """torchstore with our controller in place (imported on first use: it is heavy)."""
    import torchstore

    import forge_ptq.store_controller  # noqa: F401  (installs itself)

    return torchstore


async def within(what: str, operation: Awaitable[T], nbytes: int = 0) -> T:
    """Await with a deadline; any failure becomes a StoreError that says what failed."""
    limit = BASE_TIMEOUT_S + nbytes / SLOWEST_BYTES_PER_S
    try:
        async with asyncio.timeout(limit):
            return await operation
    except StoreError:
        raise
    except TimeoutError as error:
        raise StoreError(f"{what}: no answer from the store within {limit:.0f} s") from error
    except Exception as error:
        text = str(error)
        if "torchstore.initialize" in text:
            raise StoreNotRunning(
                f"{what}: the store is not initialized; await store.initialize() in the client "
                "first"
            ) from error
        lines = [line for line in text.strip().splitlines() if line.strip()] or [repr(error)]
        raise StoreError(f"{what}: {lines[-1].strip()}") from error


async def put(key: str, value: Any, nbytes: int = 0) -> None:
    """Store a tensor or a JSON string under a key."""
    await within(f"put {key}", ts().put(key, value), nbytes)


async def get(key: str, nbytes: int = 0) -> Any:
    """What is stored under a key; nbytes is what it should hold, for the deadline."""
    return await within(f"get {key}", ts().get(key), nbytes)


async def exists(key: str) -> bool:
    """Whether a key is stored and, for a DTensor, complete."""
    return await within(f"look up {key}", ts().exists(key))


async def keys(prefix: str | None = None) -> list[str]:
    """Keys that equal prefix or continue it after a dot; all keys without one."""
    return await within(f"list keys of {prefix or 'the store'}", ts().keys(prefix))


async def purge(keys: Sequence[str]) -> int:
    """Delete keys, partly stored DTensors too; returns how many were known."""
    if not keys:
        return 0
    client = await within(f"delete {keys[0]}", ts().client())
    return await within(f"delete {keys[0]}", client._controller.purge.call_one(list(keys)))


async def gather(operations: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run with at most CONCURRENCY in flight; the first failure cancels the rest and is raised."""
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(operation: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await operation()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(operation)) for operation in operations]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task.result() for task in tasks]


async def put_tensor(key: str, tensor: torch.Tensor, rank: int) -> None:
    """Put a plain tensor, this rank's shard of a DTensor, or (rank 0) a DTensor gathered."""
    from torch.distributed.tensor import DTensor

    nbytes = tensor.numel() * tensor.element_size()
    if not isinstance(tensor, DTensor):
        await put(key, compact(tensor), nbytes)
    elif keeps_shards(tensor):
        await within(f"put {key}", _put_shard(key, tensor), nbytes)
    else:
        with torch.no_grad():
            full = tensor.full_tensor()
        if rank == 0:
            await put(key, compact(full), nbytes)


async def _put_shard(key: str, tensor: Any) -> None:
    """What torchstore's client does to put a DTensor, with the shard brought to the CPU first."""
    from torchstore.transport.pipe import Request

    request = Request.from_dtensor(tensor)
    request.tensor_val = compact(tensor.to_local())
    await _put_request(key, request)


async def _put_request(key: str, request: Any) -> None:
    from torchstore.transport.pipe import Pipe

    client = await ts().client()
    volume, volume_id = client.strategy.select_storage_volume()
    await Pipe(volume).put_to_storage_volume(key, request)
    await client._controller.notify_put.call(key, request.meta_only(), volume_id)


async def put_slice(
    key: str,
    local: torch.Tensor,
    *,
    offsets: Sequence[int],
    shape: Sequence[int],
    rank: int,
    ranks: int,
) -> None:
    """Put one rank's slice of a distributed tensor, without a process group.

    local lies at offsets of the whole of this shape; it may be empty. The key can be read once all
    ranks have put theirs, in whatever slices the reader likes. Unlike with a DTensor the slices
    need not be equal.
    """
    from torchstore.transport.pipe import Request, TensorSlice

    part = TensorSlice(tuple(offsets), (rank,), tuple(shape), tuple(local.shape), (ranks,))
    request = Request(tensor_val=compact(local), tensor_slice=part)
    nbytes = local.numel() * local.element_size()
    await within(f"put {key}", _put_request(key, request), nbytes)


async def get_slice(
    key: str,
    *,
    offsets: Sequence[int],
    local_shape: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Any slice of a tensor, however it was put; only the slice's bytes travel, and only once.

    The result owns its memory. StoreError if the tensor has another shape or dtype.
    """
    from torchstore.transport.pipe import TensorSlice

    result = torch.empty(tuple(local_shape), dtype=dtype)
    if result.numel() == 0:
        return result
    part = TensorSlice(tuple(offsets), (), tuple(shape), tuple(local_shape), ())
    await within(f"get {key}", _get_pieces(key, part, result), result.numel() * dtype.itemsize)
    return result


async def _get_pieces(key: str, part: Any, result: torch.Tensor) -> None:
    """Fill result with a part of a tensor, from the slices of it that the volumes hold."""
    from torchstore.controller import ObjectType
    from torchstore.transport.pipe import Pipe, Request
    from torchstore.utils import get_slice_intersection

    client = await ts().client()
    pieces: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    for volume_id, info in (await client._locate_volumes(key)).items():
        volume = client.strategy.get_storage_volume(volume_id)
        whole = info.object_type is ObjectType.TENSOR
        for stored in [part] if whole else info.tensor_slices:
            piece = get_slice_intersection(stored, part)
            if piece is not None:  # the same one may lie there several times, once per replica
                pieces[(*piece.offsets, *piece.local_shape)] = (volume, piece)
    if sum(math.prod(piece.local_shape) for _, piece in pieces.values()) != result.numel():
        raise StoreError(f"get {key}: the slices stored do not make up one of {part.global_shape}")
    for volume, piece in pieces.values():
        request = Request.from_tensor_slice(piece)
        tensor = await Pipe(volume).get_from_storage_volume(key, request)
        if tensor.dtype != result.dtype or tuple(tensor.shape) != tuple(piece.local_shape):
            raise StoreError(
                f"get {key}: expected {result.dtype} {list(piece.local_shape)}, got "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
        where = zip(piece.offsets, part.offsets, piece.local_shape, strict=True)
        result[tuple(slice(at - base, at - base + size) for at, base, size in where)] = tensor
