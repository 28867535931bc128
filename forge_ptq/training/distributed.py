"""The process group of a trainer's or reference model's ranks, and what works on their shards."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from forge_ptq.numerics import rounding

TIMEOUT_S = 300.0
"""Longest wait for another rank in any collective."""


def init_process_group(rank: int, world_size: int) -> None:
    """Joins `world_size` ranks; does nothing where that has happened in this process.

    One rank needs no address. Several meet at MASTER_ADDR:MASTER_PORT, which the runtime sets when
    it spawns a mesh. Raises RuntimeError where the process already belongs to a group of another
    size, as two actors of different sizes in one process would.
    """
    if dist.is_initialized():
        if dist.get_world_size() != world_size:
            raise RuntimeError(
                f"this process belongs to a group of {dist.get_world_size()} ranks, an actor with "
                f"{world_size} cannot share it: give them different `colocate` groups"
            )
        return
    gpu = torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    if gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    store = dist.HashStore() if world_size == 1 else None
    if store is None and "MASTER_ADDR" not in os.environ:
        raise RuntimeError(f"{world_size} ranks need MASTER_ADDR and MASTER_PORT to meet at")
    dist.init_process_group(
        backend,
        init_method=None if store else "env://",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )


def sum_over_ranks(values: dict[str, float], copies: int = 1) -> dict[str, float]:
    """Adds each value over all ranks; every rank passes the same keys and gets the sums. Of
    `copies` ranks that hold the same value one counts."""
    return {k: v / copies for k, v in _reduce(values, dist.ReduceOp.SUM).items()}


def max_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """The largest of each value over all ranks."""
    return _reduce(values, dist.ReduceOp.MAX)


def gather_rows(rows: Tensor, sizes: list[int], index: int) -> Tensor:
    """[sizes[index], F] fp64 of each data-parallel rank -> [sum(sizes), F] of all, in their order.

    `index` is this rank's place among them; ranks that share one hold the same rows. No value is
    -inf. Raises ValueError where `rows` does not have the size announced.
    """
    if len(rows) != sizes[index]:
        raise ValueError(f"{len(rows)} rows on data-parallel rank {index}; expected {sizes[index]}")
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rows.cpu()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    whole = torch.full((sum(sizes), rows.shape[1]), -torch.inf, dtype=rows.dtype, device=device)
    first = sum(sizes[:index])
    whole[first : first + len(rows)] = rows.to(device)
    dist.all_reduce(whole, op=dist.ReduceOp.MAX)
    return whole.cpu()


def stochastic_bf16(tensor: Tensor, name: str) -> Tensor:
    """`rounding.stochastic_bf16` of a tensor or of each rank's shard of it: the same bits, however
    it is sharded. Raises TypeError unless it is fp32, and for partial sums."""
    if not isinstance(tensor, DTensor):
        return rounding.stochastic_bf16(tensor, name)
    mesh, placements, whole = tensor.device_mesh, tensor.placements, tensor.shape
    if any(placement.is_partial() for placement in placements):
        raise TypeError(f"{name}: {placements}; expected no partial sums")
    local = tensor.to_local()
    positions = [_positions(tensor, axis).to(local.device) for axis in range(tensor.ndim)]
    rounded = rounding.stochastic_bf16(local, name, whole=whole, positions=positions)
    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(
        rounded, mesh, placements, run_check=False, shape=whole, stride=stride
    )


def _positions(tensor: DTensor, axis: int) -> Tensor:
    """int32 indices along one dimension that this rank holds: an index sharded as that is."""
    placements: list[Replicate | Shard | _StridedShard] = []
    for placement in tensor.placements:
        if isinstance(placement, _StridedShard) and placement.dim == axis:
            placements.append(_StridedShard(0, split_factor=placement.split_factor))
        else:
            placements.append(Shard(0) if placement.is_shard(axis) else Replicate())
    every = torch.arange(
        tensor.shape[axis], dtype=torch.int32, device=tensor.device_mesh.device_type
    )
    return distribute_tensor(every, tensor.device_mesh, placements, src_data_rank=None).to_local()


def _reduce(values: dict[str, float], op: dist.ReduceOp.RedOpType) -> dict[str, float]:
    if not values or not dist.is_initialized() or dist.get_world_size() == 1:
        return dict(values)
    keys = sorted(values)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    packed = torch.tensor([values[k] for k in keys], dtype=torch.float64, device=device)
    dist.all_reduce(packed, op=op)
    return dict(zip(keys, packed.tolist(), strict=True))
