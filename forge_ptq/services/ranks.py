"""Ranks: how the processes of one tensor-parallel replica agree on what to do next.

Control messages only (Python objects over gloo), beside whatever the model itself communicates.
One process alone needs none of it: then nothing here touches torch.distributed.

All calls block, so they belong in a worker thread, and all ranks must make the same calls in the
same order. A rank that died makes the others' calls raise. One that hangs, or has nothing to say,
makes them wait: that something hangs is for rank 0's beats to find out (see quantizer.py).
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")

TIMEOUT_S = 86_400.0


class Ranks:
    """The ranks of one replica; ``connect`` first."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._group: Any = None

    def connect(self) -> None:
        """Join the others: environment variables RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and
        LOCAL_RANK for the GPU if this process was given GPUs."""
        if self.size == 1:
            return
        import torch
        import torch.distributed as dist

        gpus = bool(os.environ.get("CUDA_VISIBLE_DEVICES")) and torch.cuda.is_available()
        if gpus:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", self.rank)))
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))

    def broadcast(self, value: T | None = None) -> T:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value  # type: ignore[return-value]
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, in order."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values
