"""Actors of test_store.py, in a module of their own so that worker processes can import them."""

from __future__ import annotations

import os
from typing import Any

import torch

from forge_ptq import store
from forge_ptq.artifact import ArtifactRef, QuantizedArtifact
from forge_ptq.runtime import ForgeActor, endpoint


class Reader(ForgeActor):
    """Another process that uses the store."""

    @endpoint
    async def weights(self, version: int) -> dict[str, torch.Tensor]:
        return await store.get_weights(version)

    @endpoint
    async def artifact(self, ref: ArtifactRef) -> QuantizedArtifact:
        return await store.get_artifact(ref)

    @endpoint
    async def put(self, version: int) -> int:
        await store.put_weights(version, {"w": torch.full((3,), float(version))})
        return os.getpid()


class ShardedTrainer(ForgeActor):
    """Ranks of one trainer, each putting its shards."""

    def state(self) -> dict[str, torch.Tensor]:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        full = expected_sharded()
        placements: dict[str, list[Any]] = {
            "even": [Shard(0)],
            "columns": [Shard(1)],
            "uneven": [Shard(0)],
            "single_row": [Shard(0)],
            "replicated": [Replicate()],
            "bf16": [Shard(0)],
        }
        state: dict[str, torch.Tensor] = {
            name: distribute_tensor(full[name], mesh, placement)
            for name, placement in placements.items()
        }
        return {**state, "plain": full["plain"]}

    @endpoint
    async def push(self, version: int, only_rank: int | None = None) -> None:
        state = self.state()
        if only_rank is not None:
            state = {"even": state["even"], "bf16": state["bf16"]}
            if self._rank != only_rank:
                return
        await store.put_weights(version, state)

    @endpoint
    async def push_then_train(self, version: int) -> None:
        state = self.state()
        await store.put_weights(version, state)
        with torch.no_grad():
            for tensor in state.values():
                tensor.mul_(0)


def expected_sharded() -> dict[str, torch.Tensor]:
    grid = torch.arange(48.0)
    return {
        "even": grid.reshape(4, 12),
        "columns": grid.reshape(6, 8),
        "uneven": grid[:15].reshape(5, 3),
        "single_row": grid[:7].reshape(1, 7),
        "replicated": grid[:9],
        "bf16": grid.reshape(8, 6).bfloat16(),
        "plain": grid[:5],
    }
