"""fp32 weights to bf16 so that small updates survive on average.

A policy starts from bf16 weights, every one exactly representable, and an update moves a weight by
about the learning rate: at 1e-5 much less than the spacing of bf16 around most weights. Rounding to
nearest gives those back as they were, so what was learnt is not served. Stochastic rounding
(Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015) rounds up in magnitude
with a probability of the distance to the value below in units of the spacing, and so keeps the
mean: the sums that a matrix product forms see the update, with noise of at most half a spacing.

Here the draw of a weight is **fixed**: a hash of the tensor's name and the weight's position. So

- the same weights give the same bf16, in every push, after a resume, however they are sharded;
- a weight that grows is rounded up once within a spacing, when it passes its own threshold, and
  stays there: versions differ by what was learnt, not by new noise;
- weights that are representable are never changed.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch

CHUNK = 1 << 22
"""Elements rounded at a time, which bounds the memory in use beside the result."""

_LOW = 0xFFFF
"""The bits of an fp32 number that bf16 does not have."""


def stochastic_bf16(
    tensor: torch.Tensor,
    name: str,
    *,
    whole: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
) -> torch.Tensor:
    """bf16 of a fp32 tensor, rounded up or down by a fixed draw per element.

    name: whose draws. whole, offset: shape of the tensor that this one is a part of and the part's
    first position in it; the parts come out as the whole does. What is not finite stays as it is;
    what is over the largest bf16 may become infinite, as in rounding to nearest.

    Raises TypeError for another dtype, ValueError for a part that lies outside the whole.
    """
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name}: {tensor.dtype}; expected torch.float32")
    shape = tuple(tensor.shape)
    whole = shape if whole is None else tuple(whole)
    offset = (0,) * len(shape) if offset is None else tuple(offset)
    fits = len(whole) == len(offset) == len(shape) and all(
        first >= 0 and first + size <= total
        for first, size, total in zip(offset, shape, whole, strict=True)
    )
    if not fits:
        raise ValueError(f"{name}: {shape} at {offset} is no part of {whole}")
    result = torch.empty(shape, dtype=torch.bfloat16, device=tensor.device)
    if not tensor.numel():
        return result
    if not shape:
        return _round(tensor, _draws(name, (1,), (1,), (0,), tensor.device).reshape(()))
    rows = max(1, CHUNK // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0], rows):
        part = tensor[first : first + rows]
        start = (offset[0] + first, *offset[1:])
        draws = _draws(name, tuple(part.shape), whole, start, tensor.device)
        result[first : first + rows] = _round(part, draws)
    return result


def _round(tensor: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    bits = tensor.contiguous().view(torch.int32)
    # A carry out of the low bits is the next bf16 away from zero, in the next binade too.
    moved = draws.add_(bits).bitwise_and_(~_LOW).view(torch.float32)
    # Infinity has no low bits to carry from; NaN may have.
    return torch.where(tensor.isnan(), tensor, moved).to(torch.bfloat16)


def _draws(
    name: str,
    shape: tuple[int, ...],
    whole: tuple[int, ...],
    offset: tuple[int, ...],
    device: torch.device,
) -> torch.Tensor:
    """int32 in [0, 2^16) per element: positions in the whole tensor, hashed."""
    place = torch.full((1,) * len(shape), _signed(zlib.crc32(name.encode())), dtype=torch.int32)
    place = place.to(device)
    for axis, (size, total, first) in enumerate(zip(shape, whole, offset, strict=True)):
        along = torch.arange(first, first + size, dtype=torch.int32, device=device)
        at = [1] * len(shape)
        at[axis] = size
        place = place * total + along.view(at)
    # Multiply, xor-shift, multiply: the high bits then depend on all of the position. Products wrap
    # around at 2^32. The factors are MurmurHash3's.
    h = place.expand(shape) * _signed(0x85EBCA6B)
    h.bitwise_xor_(h >> 15).mul_(_signed(0xC2B2AE35))
    return h.bitwise_right_shift_(16).bitwise_and_(_LOW)


def _signed(value: int) -> int:
    """The int32 of the same 32 bits."""
    return value - (1 << 32) if value >= 1 << 31 else value
