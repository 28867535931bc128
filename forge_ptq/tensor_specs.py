"""What a tensor must be, and proof that it is: shape, dtype and a hash of its bytes."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch


class ArtifactError(ValueError):
    """An artifact that must not be served; the message names the tensor and what is wrong."""


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor must be."""

    shape: tuple[int, ...]
    dtype: str
    """As torch prints it, without "torch."."""
    sha256: str
    """Of the row-major bytes."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called name ("int8"); ArtifactError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ArtifactError(f"{name!r} is not a tensor dtype")
    return dtype


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The row-major bytes of any tensor as a flat uint8 tensor (a view where possible)."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def hash_tensor(tensor: torch.Tensor) -> str:
    """sha256 hex digest of the row-major bytes, any dtype."""
    return hashlib.sha256(tensor_bytes(tensor).numpy().data).hexdigest()


def describe_tensor(tensor: torch.Tensor) -> TensorSpec:
    """Shape, dtype and hash of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(tuple(tensor.shape), dtype, hash_tensor(tensor))
