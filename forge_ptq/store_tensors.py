"""What TorchStore may be given: tensors made safe to put, and who is putting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard


@dataclass(frozen=True)
class StoredTensor:
    """What a marker says about a tensor, and a reader checks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole, for shards too."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StoredTensor:
        """Of a plain tensor or a DTensor."""
        return cls(tensor.dtype, tuple(tensor.shape))

    @classmethod
    def from_record(cls, record: tuple[str, list[int]]) -> StoredTensor:
        """Back from what ``record`` made."""
        return cls(getattr(torch, record[0]), tuple(record[1]))

    def record(self) -> tuple[str, list[int]]:
        """As JSON keeps it."""
        return str(self.dtype).removeprefix("torch."), list(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize


def writers(
    state: Mapping[str, torch.Tensor], rank: int | None, world_size: int | None
) -> tuple[int, int]:
    """(rank, world_size) of the writers of a state; ValueError if only one is given."""
    if (rank is None) != (world_size is None):
        raise ValueError("give both rank and world_size, or neither")
    if rank is not None and world_size is not None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not within world_size {world_size}")
        return rank, world_size
    if any(isinstance(tensor, DTensor) for tensor in state.values()):
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on CPU, contiguous, owning just its own bytes (pickling a view sends all)."""
    plain = tensor.detach().cpu().contiguous()
    if plain.untyped_storage().nbytes() != plain.numel() * plain.element_size():
        plain = plain.clone()
    return plain


def keeps_shards(tensor: DTensor) -> bool:
    """Whether TorchStore can keep a DTensor shard by shard.

    It derives offsets from equal plain slices and stores partial sums as if they were replicas,
    so anything but even Shard and Replicate placements has to be gathered.
    """
    shape = list(tensor.shape)
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard or shape[placement.dim] % size:
            return False
        shape[placement.dim] //= size
    return all(shape)
