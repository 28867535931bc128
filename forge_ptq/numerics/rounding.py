"""fp32 weights to bf16 so that small updates survive on average.

A policy starts from bf16 weights, every one exactly representable, and an update moves a weight by
about the learning rate: at 1e-5 much less than the spacing of bf16 around most weights. Rounding to
nearest gives those back as they were, so what was learnt is not served. Stochastic rounding
(Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015) rounds up in magnitude
with a probability of the distance to the value below in units of the spacing, and so keeps the
mean: the sums that a matrix product forms see the update, under noise with a standard deviation of
at most half a spacing.

Here the draw of a weight is **fixed**: a hash of the tensor's name and the weight's position. So

- the same weights give the same bf16, in every push, after a resume, however they are sharded;
- a weight that grows is rounded up once within a spacing, when it passes its own threshold, and
  stays there: versions differ by what was learnt, not by new noise;
- weights that are representable are never changed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

CHUNK = 1 << 22
"""Elements rounded at a time, in whole rows: bounds the memory in use beside the result."""

_LOW = 0xFFFF
"""The bits of an fp32 number that bf16 does not have."""


def stochastic_bf16(
    tensor: torch.Tensor,
    name: str,
    *,
    whole: Sequence[int] | None = None,
    positions: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """bf16 of a fp32 tensor, rounded up or down by a fixed draw per element.

    name: whose draws. whole, positions: shape of the tensor that this one is a part of, and for
    each dimension the part's indices in it (int32 [size], on the tensor's device); the part comes
    out as it does in the whole. What is not finite stays as it is; what is over the largest
    bf16 may become infinite, as in rounding to nearest.

    Raises TypeError for another dtype, ValueError for positions that do not match.
    """
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name}: {tensor.dtype}; expected torch.float32")
    shape = tuple(tensor.shape)
    whole = shape if whole is None else tuple(whole)
    if positions is None:
        positions = [torch.arange(size, dtype=torch.int32, device=tensor.device) for size in shape]
    given = tuple(len(along) for along in positions)
    if given != shape or len(whole) != len(shape):
        raise ValueError(f"{name}: positions for {given} of {whole}; expected {shape} of them")
    result = torch.empty(shape, dtype=torch.bfloat16, device=tensor.device)
    if not shape:
        return _round(tensor, _draws(name, (), (), tensor.device))
    rows = max(1, CHUNK // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0], rows):
        some = slice(first, first + rows)
        draws = _draws(name, [positions[0][some], *positions[1:]], whole, tensor.device)
        result[some] = _round(tensor[some], draws)
    return result


def _round(tensor: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    bits = tensor.contiguous().view(torch.int32)
    # A carry out of the low bits is the next bf16 away from zero, in the next binade too.
    moved = draws.add_(bits).bitwise_and_(~_LOW).view(torch.float32)
    # Infinity has no low bits to carry from; NaN may have.
    return torch.where(tensor.isnan(), tensor, moved).to(torch.bfloat16)


def _draws(
    name: str, positions: Sequence[torch.Tensor], whole: Sequence[int], device: torch.device
) -> torch.Tensor:
    """int32 in [0, 2^16) per element: name and position in the whole tensor, hashed."""
    place = torch.zeros((1,) * len(positions), dtype=torch.int32, device=device)
    for axis, (along, total) in enumerate(zip(positions, whole, strict=True)):
        at = [1] * len(positions)
        at[axis] = len(along)
        place = place * total + along.view(at)
    # An odd factor and an addend of its own per name: two tensors' positions meet here and there
    # among 2^32 numbers, never in rows. Then MurmurHash3's finalizer. Products wrap around.
    factor, addend = _factor_and_addend(name)
    h = (place * factor).add_(addend)
    h.bitwise_xor_(_shifted(h, 16)).mul_(_signed(0x85EBCA6B))
    h.bitwise_xor_(_shifted(h, 13)).mul_(_signed(0xC2B2AE35))
    return h.bitwise_xor_(_shifted(h, 16)).bitwise_and_(_LOW)


def _factor_and_addend(name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    factor, addend = (int.from_bytes(part, "little") for part in (digest[:4], digest[4:]))
    return _signed(factor | 1), _signed(addend)


def _shifted(h: torch.Tensor, by: int) -> torch.Tensor:
    """The 32 bits moved right, zeros coming in: >> repeats the sign."""
    return (h >> by).bitwise_and_((1 << (32 - by)) - 1)


def _signed(value: int) -> int:
    """The int32 of the same 32 bits."""
    return value - (1 << 32) if value >= 1 << 31 else value
