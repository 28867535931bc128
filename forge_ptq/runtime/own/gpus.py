"""Assignment of this machine's GPUs to processes; needs no CUDA library."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path


def visible_gpus() -> list[int]:
    """GPU ids that this process may hand out: CUDA_VISIBLE_DEVICES, else the device files.

    Raises ValueError if CUDA_VISIBLE_DEVICES is not a list of integers.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        names = (path.name for path in Path("/dev").glob("nvidia*"))
        return sorted(int(m[1]) for name in names if (m := re.fullmatch(r"nvidia(\d+)", name)))
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES = {text!r}: expected integers separated by commas"
        ) from error


class GpuPool:
    """GPUs that are not assigned, lowest ids first."""

    def __init__(self, ids: Sequence[int]) -> None:
        if any(not isinstance(i, int) or i < 0 for i in ids) or len(set(ids)) != len(ids):
            raise ValueError(f"GPU ids = {list(ids)}: expected distinct integers >= 0")
        self._free = sorted(ids)

    @property
    def free(self) -> list[int]:
        """Ids that nobody holds."""
        return list(self._free)

    def take(self, count: int, owner: str) -> list[int]:
        """Assigns `count` GPUs. Raises RuntimeError naming `owner` if there are too few."""
        if count > len(self._free):
            raise RuntimeError(f"{owner} asks for {count} GPUs, {len(self._free)} are free")
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, ids: Sequence[int]) -> None:
        """Takes GPUs back."""
        self._free = sorted({*self._free, *ids})
