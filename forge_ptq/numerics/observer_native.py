"""The observer's pass over one input in C++ (``kernels/cpu/observe.cpp``), if it can be had.

The torch version in ``observer.py`` is the reference: counts, histogram and absmax are the same to
the last bit. Sums are closer to the true ones here: every channel has one double, to which rows are
added in order; fp32 squares are exact in it. They depend on nothing else: not on the number of
threads (which share out channels), nor on the CPU.

Shape suffixes as in ``observer.py``: N rows, C channels.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from forge_ptq.numerics.compiled import SOURCES, NotCompiledError, load
from forge_ptq.numerics.stats import MANTISSA_SHIFT

log = logging.getLogger(__name__)

SOURCE = SOURCES / "cpu" / "observe.cpp"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the kernel calls them."""

CLEAN, DIRTY, REFUSED = range(3)
"""What it answers."""

CODES = 1 << (31 - MANTISSA_SHIFT)
"""Values of ``bits(|x|) >> MANTISSA_SHIFT``."""

ELEMENTS_PER_THREAD = 1 << 18
"""Fewer are not worth waking a thread: they take a tenth of a millisecond or two."""

CHANNELS_PER_THREAD = 64
"""Shares are multiples of it, so that threads do not write to the same cache line."""


class Kernel(NamedTuple):
    """The library's two functions; their arguments are explained in the C++."""

    observe: Callable[..., int]
    merge: Callable[..., None]


class Sums:
    """Raw statistics of one site, all zero at first: absmax_C fp32, sum_C and sum_sq_C fp64 [C],
    codes int64 [CODES]. The tensors are never replaced, only written to."""

    def __init__(self, channels: int, device: torch.device) -> None:
        self.absmax_C = torch.zeros(channels, dtype=torch.float32, device=device)
        self.sum_C, self.sum_sq_C = torch.zeros(2, channels, dtype=torch.float64, device=device)
        self.codes = torch.zeros(CODES, dtype=torch.int64, device=device)
        parts = (self.absmax_C, self.sum_C, self.sum_sq_C, self.codes)
        self.addresses = tuple(part.data_ptr() for part in parts)

    def merge(self, other: Sums) -> None:
        """Add what another has seen."""
        torch.maximum(self.absmax_C, other.absmax_C, out=self.absmax_C)
        self.sum_C += other.sum_C
        self.sum_sq_C += other.sum_sq_C
        self.codes += other.codes


@functools.cache
def kernel() -> Kernel | None:
    """The C functions, compiled and checked, or None, having logged why once per process."""
    try:
        found = _functions(load(SOURCE))
        _check(found)
    except (NotCompiledError, OSError) as error:
        log.warning("activation statistics are collected by torch, which is slower: %s", error)
        return None
    return found


def takes(x_NC: torch.Tensor) -> bool:
    """Whether ``observe`` works for this input: a CPU tensor of a known dtype, and a kernel."""
    return x_NC.device.type == "cpu" and x_NC.dtype in DTYPES and kernel() is not None


def observe(
    x_NC: torch.Tensor,
    rows_N: torch.Tensor | None,
    factor_C: torch.Tensor | None,
    scratch: Sums,
    total: Sums,
) -> bool:
    """Add the rows of x that count to the total; or, if any element of them is not finite after
    multiplication, leave it as it was and say False.

    x_NC: any strides, though channels that are not adjacent get copied. rows_N: int64, rows of x
    that count, or None: all. factor_C: fp32, x is multiplied by it, or None. scratch, total: of C
    channels, on the CPU; scratch is overwritten.

    Raises ValueError for rows that x does not have and for sizes or dtypes that do not fit.
    """
    functions = kernel()
    if functions is None:
        raise ValueError("there is no compiled kernel; ask takes() first")
    rows, channels = x_NC.shape
    # A pointer carries neither type nor length: this is the last place to see them.
    if len(scratch.absmax_C) != channels or len(total.absmax_C) != channels:
        raise ValueError(f"sums for {len(total.absmax_C)} channels, x has {channels}")
    if rows_N is not None and (rows_N.dtype != torch.int64 or rows_N.device.type != "cpu"):
        raise ValueError(f"rows_N: expected int64 on the CPU, got {rows_N.dtype} {rows_N.device}")
    if factor_C is not None and (factor_C.dtype, len(factor_C)) != (torch.float32, channels):
        raise ValueError(
            f"factor_C: expected fp32 [{channels}], got {factor_C.dtype} [{len(factor_C)}]"
        )
    if channels > 1 and x_NC.stride(1) != 1:
        x_NC = x_NC.contiguous()
    rows_N = None if rows_N is None else rows_N.contiguous()
    factor_C = None if factor_C is None else factor_C.contiguous()
    pointer, step, index = x_NC.data_ptr(), x_NC.element_size(), _address(rows_N)
    factor, count = _address(factor_C), rows if rows_N is None else len(rows_N)
    absmax, sum_, sum_sq, codes = scratch.addresses

    def share(start: int, stop: int, codes: int) -> int:
        return functions.observe(
            pointer + start * step, DTYPES[x_NC.dtype], x_NC.stride(0), rows, index, count,
            stop - start, factor and factor + 4 * start,
            absmax + 4 * start, sum_ + 8 * start, sum_sq + 8 * start, codes,
        )  # fmt: skip

    cuts = _cuts(count, channels)
    if len(cuts) == 2:
        states = [share(0, channels, codes)]
    else:
        counts = torch.empty(len(cuts) - 1, CODES, dtype=torch.int64)
        states = list(_pool().map(share, cuts[:-1], cuts[1:], [row.data_ptr() for row in counts]))
        scratch.codes.copy_(counts.sum(0))
    if REFUSED in states:
        raise ValueError(f"rows_N: not all between 0 and {rows - 1}, or x of {x_NC.dtype}")
    if DIRTY in states:
        return False
    functions.merge(channels, *scratch.addresses, *total.addresses)
    return True


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _cuts(rows: int, channels: int) -> list[int]:
    """Where channels are cut for as many threads as torch may use and the work is worth."""
    threads = min(torch.get_num_threads(), rows * channels // ELEMENTS_PER_THREAD)
    if threads <= 1:
        return [0, channels]
    width = -(-channels // (threads * CHANNELS_PER_THREAD)) * CHANNELS_PER_THREAD
    return [*range(0, channels, width), channels]


_threads: ThreadPoolExecutor | None = None
_threads_lock = threading.Lock()


def _pool() -> ThreadPoolExecutor:
    """Threads of this process; they sleep in a queue and do nothing but call the kernel."""
    global _threads
    with _threads_lock:
        if _threads is None:
            _threads = ThreadPoolExecutor(os.cpu_count(), "forge_ptq-observe")
        return _threads


def _forget_pool() -> None:
    """A child by fork has no threads but its own, and would wait for them for ever."""
    global _threads, _threads_lock
    _threads, _threads_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_pool)


def _functions(library: Any) -> Kernel:
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    observe_, merge = library.forge_ptq_observe, library.forge_ptq_merge
    observe_.argtypes = [pointer, ctypes.c_int, size, size, pointer, size, size, *[pointer] * 5]
    observe_.restype = ctypes.c_int
    merge.argtypes, merge.restype = [size, *[pointer] * 8], None
    return Kernel(observe_, merge)


def _check(functions: Kernel) -> None:
    """Raise NotCompiledError unless the kernel is right about a few hundred values.

    Against a miscompilation, and against constants of the source that have drifted from ours.
    """
    x_NC = torch.linspace(-3, 3, 11 * 37).pow(9).view(11, 37)
    factor_C = torch.exp2(torch.arange(37) % 5 - 2.0)
    for dtype, number in DTYPES.items():
        seen_NC, sums, total = x_NC.to(dtype), Sums(37, x_NC.device), Sums(37, x_NC.device)
        functions.observe(
            seen_NC.data_ptr(), number, 37, 11, None, 11, 37, factor_C.data_ptr(), *sums.addresses
        )
        for _ in range(2):
            functions.merge(37, *sums.addresses, *total.addresses)
        scaled_NC = seen_NC.float() * factor_C
        bits_NC = scaled_NC.abs().view(torch.int32) >> MANTISSA_SHIFT
        exact_NC = scaled_NC.double()
        if not (
            torch.equal(total.codes, 2 * bits_NC.flatten().bincount(minlength=CODES))
            and torch.equal(total.absmax_C, scaled_NC.abs().amax(0))
            and torch.allclose(total.sum_C, 2 * exact_NC.sum(0), rtol=1e-12)
            and torch.allclose(total.sum_sq_C, 2 * exact_NC.square().sum(0), rtol=1e-12)
        ):
            raise NotCompiledError(f"the compiled kernel is wrong about {dtype}")
