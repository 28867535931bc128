"""Hooks that collect ActivationStats of linear inputs during ordinary forward passes.

    with ActivationObserver(model, sites_of(layers)) as observer:
        for tokens_BT, mask_BT in batches:
            observer.mask_BT = mask_BT   # which positions are real, or None: all of them
            model(tokens_BT)
        stats = observer.take()

Layers that an engine fuses read the same tensor, so a site has one hook, on its first member.

What it costs. A rollout batch shows one site a few hundred thousand to a few million elements. On a
CPU with a compiler they are read once, by C++ (``observer_native``). The torch version here is the
reference for that, and what runs elsewhere. Every pass of it over elements that have left the cache
costs a tenth of a nanosecond or more per element, so rows are walked in chunks that stay there and
all passes over a chunk work in two scratch buffers. The bin of an element is one shift of its bit
pattern: ``|x|`` as int32, shifted right by 20, counted by ``bincount`` (the slowest part) over all
2048 codes that exponent and three mantissa bits can take. On a GPU the chunk is the whole input.

Clamping codes to the BINS that are kept happens once per ``take``. Codes of NaN and infinity lie
above all others, so whether a batch was clean is known without looking; only a batch that was not
takes the slow way (``measure``).

Padding is never looked at: only rows of real positions are read, with indices made once per
forward. Without padding nothing is copied.

Sums are per channel in fp64 and added up at the end with one rounding. In torch a chunk's share is
summed in fp32 first: sums of squares are then good to 1e-6, sums of x to 1e-6 of the sum of |x|.
Both are as exact as fp64 in C++.

Shape suffixes: B sequences, T positions, N rows (positions that count), C channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from forge_ptq.numerics import observer_native as native
from forge_ptq.numerics.observer_native import CODES, Sums
from forge_ptq.numerics.stats import (
    BINS,
    FIRST_CODE,
    MANTISSA_SHIFT,
    ActivationStats,
    measure,
)

NON_FINITE_CODE = 0x7F800000 >> MANTISSA_SHIFT
"""The smallest code of an infinity or a NaN."""

CHUNK_ELEMENTS = 1 << 18
"""Elements per chunk on a CPU: input and two scratch buffers of 1 MiB each. Smaller chunks pay more
for calls than they gain in cache."""


class _Site(Sums):
    """Running statistics of one site, on the device of its input; every element is finite."""

    tokens = 0

    def stats(self) -> ActivationStats:
        """What was seen, on the CPU."""
        codes = self.codes.cpu()
        bins = (torch.arange(CODES) - FIRST_CODE).clamp_(0, BINS - 1)
        return ActivationStats(
            tokens=self.tokens,
            absmax_C=self.absmax_C.cpu(),
            sum_sq_C=self.sum_sq_C.cpu(),
            sum=math.fsum(self.sum_C.tolist()),
            histogram_B=torch.zeros(BINS, dtype=torch.int64).index_add_(0, bins, codes),
            non_finite=0,
        )


class ActivationObserver:
    """Statistics of the inputs of some linears; a context manager that owns its hooks.

    sites: names of modules, of which the input is observed (the keys of ``sites_of``).
    shift: per site int8 [C], log2 of the smoothing factors: x / 2^shift is what gets observed.
    channels: per site the slice of its input's channels to account for; others are observed
    whole. C of shift is the input's own, before this slice.
    compiled: whether C++ counts where it can; False: torch everywhere.

    Raises KeyError for a shift or channels entry that is no site.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Iterable[str],
        *,
        shift: Mapping[str, torch.Tensor] | None = None,
        channels: Mapping[str, slice] | None = None,
        compiled: bool = True,
    ) -> None:
        self._modules = {site: model.get_submodule(site) for site in sites}
        for given in (shift or {}), (channels or {}):
            for site in given:
                if site not in self._modules:
                    raise KeyError(f"{site} is not among the observed sites")
        self._factors = {
            site: torch.exp2(-log2_C.to(torch.float32)) for site, log2_C in (shift or {}).items()
        }
        self._channels = dict(channels or {})
        self._compiled = compiled
        weights = (weight for module in self._modules.values() for weight in module.parameters())
        if compiled and any(weight.device.type == "cpu" for weight in weights):
            native.kernel()  # a compilation falls before the first forward pass, not into it
        self._mask_rows: int | None = None
        self._kept_N: torch.Tensor | None = None
        self._hooks: list[RemovableHandle] = []
        self._scratch: dict[torch.device, torch.Tensor] = {}
        self._scratch_sums: dict[int, Sums] = {}
        self._reset()

    def __enter__(self) -> ActivationObserver:
        for site, module in self._modules.items():
            # Before the hooks of a tensor-parallel style, which would turn x into a DTensor.
            hook = self._hook(site)
            self._hooks.append(module.register_forward_pre_hook(hook, prepend=True))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    @property
    def mask_BT(self) -> torch.Tensor | None:
        """bool [B, T]: the positions of the next forward passes that count. None: all do."""
        return self._mask_BT

    @mask_BT.setter
    def mask_BT(self, mask_BT: torch.Tensor | None) -> None:
        self._mask_BT = mask_BT
        self._mask_rows, self._kept_N = None, None
        if mask_BT is not None:
            self._mask_rows = mask_BT.numel()
            kept_N = mask_BT.flatten().nonzero().squeeze(1)
            self._kept_N = kept_N if len(kept_N) < mask_BT.numel() else None

    def take(self) -> dict[str, ActivationStats]:
        """Statistics since the last take, one entry per site, empty for one that saw nothing."""
        stats = {site: self._taken(site) for site in self._modules}
        self._reset()
        return stats

    def _reset(self) -> None:
        self._running: dict[str, _Site] = {}
        self._unclean: dict[str, ActivationStats] = {}

    def _taken(self, site: str) -> ActivationStats:
        parts = [self._running[site].stats()] if site in self._running else []
        parts += [self._unclean[site]] if site in self._unclean else []
        if not parts:
            part = self._channels.get(site)
            width = int(self._modules[site].in_features)  # type: ignore[arg-type]
            return ActivationStats.empty(width if part is None else len(range(width)[part]))
        return parts[0] if len(parts) == 1 else parts[0].merge(parts[1])

    def _hook(self, site: str) -> Any:
        @torch.no_grad()
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            self._see(site, args[0].detach().flatten(0, -2))

        return hook

    def _see(self, site: str, x_NC: torch.Tensor) -> None:
        if self._mask_rows is not None and len(x_NC) != self._mask_rows:
            raise ValueError(
                f"{site}: an input of {len(x_NC)} positions under a mask of {self._mask_rows}"
            )
        device = x_NC.device
        factor_C, part = self._factors.get(site), self._channels.get(site)
        if factor_C is not None:
            if len(factor_C) != x_NC.shape[1]:
                raise ValueError(
                    f"{site}: {len(factor_C)} smoothing factors for {x_NC.shape[1]} channels"
                )
            factor_C = self._factors[site] = factor_C.to(device)
        if part is not None:
            x_NC = x_NC[:, part]
            factor_C = None if factor_C is None else factor_C[part]
        if self._kept_N is not None and self._kept_N.device != device:
            self._kept_N = self._kept_N.to(device)
        total = self._running.get(site)
        if total is None:
            total = self._running[site] = _Site(x_NC.shape[1], device)
        if self._add(x_NC, factor_C, total):
            total.tokens += len(x_NC) if self._kept_N is None else len(self._kept_N)
            return
        rows_NC = x_NC if self._kept_N is None else x_NC[self._kept_N]
        rows_NC = rows_NC.to(torch.float32)
        seen = measure(rows_NC if factor_C is None else rows_NC * factor_C)
        before = self._unclean.get(site)
        self._unclean[site] = seen if before is None else before.merge(seen)

    def _add(self, x_NC: torch.Tensor, factor_C: torch.Tensor | None, total: Sums) -> bool:
        """Add the rows that count to the total, or none of them and say False."""
        width, device = x_NC.shape[1], x_NC.device
        if self._compiled and native.takes(x_NC):
            if width not in self._scratch_sums:
                self._scratch_sums[width] = Sums(width, device)
            return native.observe(x_NC, self._kept_N, factor_C, self._scratch_sums[width], total)
        fresh = Sums(width, device)
        self._count(x_NC, factor_C, fresh)
        dirty = fresh.codes[NON_FINITE_CODE:].any() | ~torch.isfinite(fresh.sum_sq_C).all()
        if bool(dirty):  # or squares that overflow fp32
            return False
        total.merge(fresh)
        return True

    def _count(self, x_NC: torch.Tensor, factor_C: torch.Tensor | None, sums: Sums) -> None:
        """Add the rows that count, in torch, chunk by chunk."""
        rows = len(x_NC) if self._kept_N is None else len(self._kept_N)
        width = x_NC.shape[1]
        if not rows or not width:
            return
        step = rows if x_NC.device.type != "cpu" else max(1, min(rows, CHUNK_ELEMENTS // width))
        values, codes = self._buffers(step * width, x_NC.device)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            size = (stop - start) * width
            abs_NC, codes_NC = values[:size].view(-1, width), codes[:size].view(-1, width)
            chunk_NC = self._gather(x_NC, start, stop, factor_C, abs_NC)
            sums.sum_C += chunk_NC.sum(0)
            torch.abs(chunk_NC, out=abs_NC)
            torch.maximum(sums.absmax_C, abs_NC.amax(0), out=sums.absmax_C)
            torch.bitwise_right_shift(abs_NC.view(torch.int32), MANTISSA_SHIFT, out=codes_NC)
            sums.codes += torch.bincount(codes[:size], minlength=CODES)
            sums.sum_sq_C += abs_NC.square_().sum(0)

    def _gather(
        self,
        x_NC: torch.Tensor,
        start: int,
        stop: int,
        factor_C: torch.Tensor | None,
        out_NC: torch.Tensor,
    ) -> torch.Tensor:
        """Rows start .. stop - 1 of those that count, fp32, smoothed; a view of x if it can be."""
        if self._kept_N is None:
            chunk_NC = x_NC[start:stop]
        elif x_NC.dtype == torch.float32:
            chunk_NC = torch.index_select(x_NC, 0, self._kept_N[start:stop], out=out_NC)
        else:
            chunk_NC = x_NC.index_select(0, self._kept_N[start:stop])
        if factor_C is not None:
            return torch.mul(chunk_NC, factor_C, out=out_NC)  # fp32, as the factors are
        return chunk_NC if chunk_NC.dtype == torch.float32 else out_NC.copy_(chunk_NC)

    def _buffers(self, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Scratch for one chunk: fp32 and int32, [size] each."""
        buffer = self._scratch.get(device)
        if buffer is None or buffer.shape[1] < size:
            buffer = self._scratch[device] = torch.empty(2, size, device=device)
        return buffer[0], buffer[1].view(torch.int32)
