"""Many tensors as few flat uint8 chunks, and back.

The tensors lie end to end in one byte stream, each at a multiple of ALIGNMENT; the stream is cut
every chunk_bytes, also within a tensor. The index {name: [offset, nbytes]} is into the stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from forge_ptq.artifact import ArtifactError, TensorSpec, tensor_bytes, torch_dtype

ALIGNMENT = 64
Index = dict[str, list[int]]


def pack(
    tensors: Mapping[str, torch.Tensor], chunk_bytes: int, index: Index
) -> Iterator[torch.Tensor]:
    """Yield the chunks in order, one in memory at a time; fills index on the way."""
    remaining = sum(_padded(tensor.numel() * tensor.element_size()) for tensor in tensors.values())
    chunk, used, offset = _blank(remaining, chunk_bytes), 0, 0
    for name, tensor in tensors.items():
        data = tensor_bytes(tensor)
        size = data.numel()
        index[name] = [offset, size]
        offset += _padded(size)
        data = torch.nn.functional.pad(data, (0, _padded(size) - size))
        while data.numel():
            part = data[: chunk.numel() - used]
            chunk[used : used + part.numel()] = part
            used, data = used + part.numel(), data[part.numel() :]
            if used == chunk.numel():
                yield chunk
                remaining -= used
                chunk, used = _blank(remaining, chunk_bytes), 0


def _blank(remaining: int, chunk_bytes: int) -> torch.Tensor:
    return torch.zeros(min(remaining, chunk_bytes), dtype=torch.uint8)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def unpack(
    chunks: Sequence[torch.Tensor],
    index: Mapping[str, Sequence[int]],
    specs: Mapping[str, TensorSpec],
) -> dict[str, torch.Tensor]:
    """The tensors, in fresh memory; ArtifactError naming the first that the chunks do not hold."""
    starts, total = [], 0
    for chunk in chunks:
        starts.append(total)
        total += chunk.numel()
    tensors = {}
    for name, (offset, nbytes) in index.items():
        spec = specs[name]
        if nbytes != spec.nbytes or offset < 0 or offset + nbytes > total:
            raise ArtifactError(
                f"{name}: bytes {offset} to {offset + nbytes} of {total} stored, expected "
                f"{spec.nbytes} bytes; the artifact is truncated or its index is wrong"
            )
        data = torch.empty(nbytes, dtype=torch.uint8)
        for start, chunk in zip(starts, chunks, strict=True):
            low, high = max(offset, start), min(offset + nbytes, start + chunk.numel())
            if low < high:
                data[low - offset : high - offset] = chunk[low - start : high - start]
        tensors[name] = data.view(torch_dtype(spec.dtype)).reshape(spec.shape)
    return tensors
