"""TorchStore's controller, fit for this Monarch, and a strategy for several storage volumes.

torchstore 0.1.2 mixes sync and async endpoints in one actor, which Monarch 0.2 and later refuse:
every sync endpoint gets an async twin here. The classes are found by name in every process, so
this module must be importable in workers and must not depend on how the client was started.

``purge`` is new: TorchStore can neither read nor delete a DTensor key of which a rank is missing,
and takes three calls for every key that it does delete.

A volume answers a request for a slice with a view of what it holds, and pickling a view sends all
of its storage. Our volume sends the slice's own bytes, also of a tensor that was put whole, which
TorchStore always sends whole.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import monarch.rdma
import torch
import torchstore.api
import torchstore.controller
from monarch.actor import current_rank, endpoint
from torchstore.storage_volume import StorageVolume
from torchstore.strategy import TorchStoreStrategy

from forge_ptq.store_tensors import compact


def _async_twin(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def twin(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    return twin


def _async_endpoints(cls: type) -> dict[str, Any]:
    """Name -> async endpoint, for every sync endpoint of an actor class."""
    found: dict[str, Any] = {}
    for name in dir(cls):
        method = getattr(inspect.getattr_static(cls, name), "_method", None)
        if method is not None and not inspect.iscoroutinefunction(method):
            found[name] = endpoint(_async_twin(method))
    return found


_Base: Any = type(
    "AsyncController",
    (torchstore.controller.Controller,),
    {**_async_endpoints(torchstore.controller.Controller), "__module__": __name__},
)


class StoreController(_Base):
    """torchstore's Controller with async endpoints, plus ``purge``."""

    @endpoint
    async def purge(self, keys: list[str]) -> int:
        """Forget keys, partly committed DTensors included; returns how many were known.

        The index goes first, so that nobody finds a key whose data are being deleted.
        """
        located: list[tuple[str, str]] = []
        known = 0
        for key in keys:
            if key in self.keys_to_storage_volumes:
                known += 1
                located += [(key, volume) for volume in self.keys_to_storage_volumes[key]]
                del self.keys_to_storage_volumes[key]

        async def delete(key: str, volume: str) -> None:
            await self.strategy.get_storage_volume(volume).delete.call_one(key)

        await asyncio.gather(*(delete(key, volume) for key, volume in located))
        return known


class SpreadStrategy(TorchStoreStrategy):
    """One volume for each group of writers: a process writes to the volume of its pid."""

    @classmethod
    def get_volume_id(cls) -> str:
        """Called in each volume: its rank."""
        return str(current_rank().rank)

    def select_storage_volume(self) -> tuple[Any, str]:
        """The volume that this process writes to."""
        volume_id = str(os.getpid() % len(self.volume_id_to_coord))
        return self.get_storage_volume(volume_id), volume_id


class StoreVolume(StorageVolume):
    """torchstore's volume; slices travel without the tensor around them."""

    @endpoint
    async def get(self, key: str, transport_buffer: Any, request: Any) -> Any:
        """What is stored, or the slice of it that the request names."""
        stored = self._whole(key)
        if stored is not None and request.tensor_slice is not None:
            await transport_buffer.write_from(_cut(key, stored, request.tensor_slice))
            return transport_buffer
        answer = await self.store.get(key, transport_buffer, request)
        tensor = getattr(answer, "tensor", None)
        if isinstance(tensor, torch.Tensor):
            answer.tensor = compact(tensor)
        return answer

    @endpoint
    async def get_meta(self, key: str, request: Any = None) -> Any:
        """(shape, dtype) of what ``get`` would send; buffers for RDMA ask first."""
        stored = self._whole(key)
        if stored is not None and request is not None and request.tensor_slice is not None:
            cut = _cut(key, stored, request.tensor_slice)
            return cut.shape, cut.dtype
        return await self.store.get_meta(key, request)

    def _whole(self, key: str) -> torch.Tensor | None:
        """The tensor under a key, if it was put in one piece."""
        stored = self.store.kv.get(key)
        return stored if isinstance(stored, torch.Tensor) else None


def _cut(key: str, stored: torch.Tensor, part: Any) -> torch.Tensor:
    """A slice of a whole tensor, owning just its bytes."""
    if tuple(stored.shape) != tuple(part.global_shape):
        raise ValueError(
            f"{key}: has shape {list(stored.shape)}, expected {list(part.global_shape)}"
        )
    where = zip(part.offsets, part.local_shape, strict=True)
    return compact(stored[tuple(slice(at, at + size) for at, size in where)])


torchstore.api.Controller = StoreController
torchstore.api.StorageVolume = StoreVolume

# TorchStore asks before every transfer, through a function that Monarch has deprecated. The answer
# does not change: without RDMA over InfiniBand tensors travel in Monarch's messages.
if not monarch.rdma.is_ibverbs_available():
    os.environ.setdefault("TORCHSTORE_RDMA_ENABLED", "0")
