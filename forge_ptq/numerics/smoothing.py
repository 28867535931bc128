"""SmoothQuant with factors that are powers of two: ranges move from activations into weights.

A linear's input x and weight W may be rescaled per input channel without changing their product,
``(x / f) (W f)^T = x W^T``. Choosing f large where x has outliers flattens x, which is what one
scale per tensor (or token) needs, at the price of a less even W (Xiao et al. 2023, equation 4:
``f = max|x|^alpha / max|W|^(1 - alpha)``). The division costs nothing at run time when whatever
produces x can absorb it:

============================  =========================================================
site                          absorbed by
============================  =========================================================
q/k/v                         ``input_layernorm``'s weight
gate/up                       ``post_attention_layernorm``'s weight
o                             rows of v: attention averages values, so a factor per value
                              channel passes through. With grouped queries several query
                              heads read one value head and share its factors
down                          rows of up: silu(gate) * up is linear in up
============================  =========================================================

Here f is rounded to a power of two. Then folding only changes exponents: the folded network
computes bit for bit the same logits in bf16 as in fp32, a layer that stays in bf16 loses nothing,
and statistics of x / f are statistics of x moved by whole octaves. Rounding costs little, a factor
is off by at most sqrt(2).

One common factor per site is free (scales absorb it), so exponents are centred on their median.

Shape suffixes: C input channels of a site, P channels of its producer (C, or fewer where query
heads share a value head), N output features.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forge_ptq.numerics.plan import MODEL_TYPES, group_of
from forge_ptq.numerics.schemes.common import INT8_MAX
from forge_ptq.numerics.stats import ActivationStats

MAX_SHIFT = 15
"""Largest |log2 f|: beyond it a channel is so far out that its weights would fill all codes."""

ALPHA_GRID = (0.0, 0.5, 0.65, 0.8, 0.9)
"""Strengths tried per site; 0 leaves the site alone."""

DOWN_ALPHA = 0.5
"""Most that down_proj is smoothed: its outliers are rare and huge, weights take them badly."""


class SmoothingError(ValueError):
    """Statistics or weights that give no factors; the message names the site."""


@dataclass(frozen=True)
class SmoothingSite:
    """One input that can be smoothed, and who absorbs its factors."""

    name: str
    """The site: first of its members."""
    members: tuple[str, ...]
    """Linears that read the input; their columns are multiplied."""
    producer: str
    """Module whose weight (a norm's vector, a linear's rows and bias) is divided."""
    repeat: int = 1
    """Consecutive blocks of head_dim input channels that share one block of the producer's."""
    head_dim: int = 1
    """Size of such a block; irrelevant when repeat is 1."""

    def reduce(self, values_C: torch.Tensor) -> torch.Tensor:
        """Per producer channel the maximum over the input channels it feeds, [P]."""
        if self.repeat == 1:
            return values_C
        return values_C.view(-1, self.repeat, self.head_dim).amax(1).flatten()

    def expand(self, values_P: torch.Tensor) -> torch.Tensor:
        """Per input channel the value of the producer channel it comes from, [C]."""
        if self.repeat == 1:
            return values_P
        blocks = values_P.view(-1, 1, self.head_dim)
        return blocks.expand(-1, self.repeat, -1).flatten()

    def produced(self, values_C: torch.Tensor) -> torch.Tensor:
        """Inverse of ``expand``; SmoothingError if channels that must agree do not."""
        values_P = self.reduce(values_C)
        if not torch.equal(self.expand(values_P), values_C):
            raise SmoothingError(f"{self.name}: query heads of one value head differ in factors")
        return values_P


def smoothing_sites(
    shapes: Mapping[str, Sequence[int]], config: Any, *, down_proj: bool = False
) -> dict[str, SmoothingSite]:
    """The sites of a model that can be smoothed, by name.

    shapes: {parameter name: shape}. config: the HF config (model_type, head counts). down_proj:
    also smooth down through up's rows. A site whose producer is missing or does not fit is left
    out; so is everything in an architecture that is not in MODEL_TYPES.
    """
    if getattr(config, "model_type", None) not in MODEL_TYPES:
        return {}
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    found: dict[str, SmoothingSite] = {}
    for parameter in shapes:
        name = parameter.removesuffix(".weight")
        block, _, leaf = name.rpartition(".")
        layer = block.rpartition(".")[0]
        prefix = f"{layer}." if layer else ""
        site: SmoothingSite | None = None
        if parameter == name:
            continue
        if leaf == "q_proj":
            site = SmoothingSite(name, group_of(name), f"{prefix}input_layernorm")
        elif leaf == "gate_proj":
            site = SmoothingSite(name, group_of(name), f"{prefix}post_attention_layernorm")
        elif leaf == "o_proj" and kv_heads and heads % kv_heads == 0:
            head_dim = shapes[parameter][1] // heads
            site = SmoothingSite(name, (name,), f"{block}.v_proj", heads // kv_heads, head_dim)
        elif leaf == "down_proj" and down_proj:
            site = SmoothingSite(name, (name,), f"{block}.up_proj")
        if site is not None and _fits(site, shapes):
            found[name] = site
    return found


def _fits(site: SmoothingSite, shapes: Mapping[str, Sequence[int]]) -> bool:
    """All members exist with one input width, and the producer has the matching output width."""
    widths = {shapes.get(f"{member}.weight", (0, 0))[-1] for member in site.members}
    produced = shapes.get(f"{site.producer}.weight", (0,))[0]
    return len(widths) == 1 and produced > 0 and widths == {produced * site.repeat}


def log2_factors(
    absmax_C: torch.Tensor, weight_amax_C: torch.Tensor, alpha: float, *, name: str = "site"
) -> torch.Tensor:
    """Unrounded log2 of SmoothQuant's factors, fp64 [C], centred and clamped to MAX_SHIFT.

    A channel that never carries anything, or that no weight reads, gets 0. Alpha 0 gives zeros.
    SmoothingError for non-finite or negative input.
    """
    if not 0 <= alpha <= 1:
        raise SmoothingError(f"{name}: alpha must be within 0 and 1, got {alpha}")
    if absmax_C.shape != weight_amax_C.shape or absmax_C.dim() != 1:
        raise SmoothingError(
            f"{name}: ranges of shape {list(absmax_C.shape)} and weight maxima of shape "
            f"{list(weight_amax_C.shape)}"
        )
    a_C, w_C = absmax_C.to("cpu", torch.float64), weight_amax_C.to("cpu", torch.float64)
    for values_C, what in ((a_C, "ranges"), (w_C, "weights")):
        if not bool((torch.isfinite(values_C) & (values_C >= 0)).all()):
            raise SmoothingError(f"{name}: {what} hold a value that is NaN, infinite or negative")
    live_C = (a_C > 0) & (w_C > 0)
    if alpha == 0 or not bool(live_C.any()):
        return torch.zeros_like(a_C)
    log_C = alpha * torch.log2(a_C[live_C]) - (1 - alpha) * torch.log2(w_C[live_C])
    result_C = torch.zeros_like(a_C)
    result_C[live_C] = (log_C - log_C.median()).clamp(-MAX_SHIFT, MAX_SHIFT)
    return result_C


def factors(shift: torch.Tensor) -> torch.Tensor:
    """2^shift, fp32: exact for integer shifts; floating ones (experiments) are rounded."""
    if shift.is_floating_point():
        return torch.exp2(shift.to(torch.float32))
    return ((shift.to(torch.int32) + 127) << 23).view(torch.float32)


def expected_error(
    stats: ActivationStats, weights: Sequence[torch.Tensor], shift_C: torch.Tensor
) -> float:
    """Expected squared output error per token of the site under static int8, after smoothing.

    Rounding noise of step s has variance s^2 / 12, or the signal's own where that is smaller:
    ``sum_c min(s_x^2 / 12, E x_c^2) |W_c|^2 + sum_n s_n^2 / 12 sum_c E x_c^2``, with activations
    and weights in their smoothed form, s_x from absmax and s_n from row n's maximum.
    weights: [N, C] of every member.
    """
    f_C = factors(shift_C).to(torch.float64)
    mean_sq_C = stats.sum_sq_C.cpu() / max(stats.tokens, 1) / f_C.square()
    s_x = float((stats.absmax_C.cpu().to(torch.float64) / f_C).max()) / INT8_MAX
    noise_C = mean_sq_C.clamp(max=s_x**2 / 12)
    total = 0.0
    for weight_NC in weights:
        w_NC = weight_NC.detach().to(torch.float32) * f_C.to(weight_NC.device, torch.float32)
        norm_C = w_NC.square().sum(0, dtype=torch.float64).cpu()
        s_N = w_NC.abs().amax(1).to(torch.float64) / INT8_MAX
        total += float((noise_C * norm_C).sum())
        total += float(s_N.square().sum()) / 12 * float(mean_sq_C.sum())
    return total


def smooth_site(
    site: SmoothingSite,
    stats: ActivationStats,
    weights: Sequence[torch.Tensor],
    alpha: float | None = None,
    *,
    grid: Iterable[float] = ALPHA_GRID,
) -> tuple[float, torch.Tensor]:
    """(alpha, shift int8 [C]) of one site; alpha None picks the grid's smallest expected error.

    stats: of the raw input. weights: [N, C] of the site's members, floating. SmoothingError for
    statistics or weights that are not finite.
    """
    if stats.non_finite:
        raise SmoothingError(f"{site.name}: {stats.non_finite} activations were NaN or infinite")
    amax_C = torch.stack([w_NC.detach().abs().amax(0).float().cpu() for w_NC in weights]).amax(0)
    a_P, w_P = site.reduce(stats.absmax_C.cpu()), site.reduce(amax_C)
    best: tuple[float, float, torch.Tensor] | None = None
    for strength in grid if alpha is None else (alpha,):
        log_P = log2_factors(a_P, w_P, strength, name=site.name)
        shift_C = site.expand(log_P.round().to(torch.int8))
        error = expected_error(stats, weights, shift_C) if alpha is None else math.nan
        if best is None or error < best[0]:
            best = (error, strength, shift_C)
    if best is None:
        raise SmoothingError(f"{site.name}: no alpha to choose from")
    return best[1], best[2]


class Folding:
    """What smoothing does to each parameter.

    folding = Folding(smoothing_sites(shapes, config), calibration.shift)
    folded = folding.apply("model.layers.0.self_attn.v_proj.weight", tensor)
    """

    def __init__(
        self, sites: Mapping[str, SmoothingSite], shifts: Mapping[str, torch.Tensor]
    ) -> None:
        self._columns: dict[str, torch.Tensor] = {}
        self._rows: dict[str, torch.Tensor] = {}
        for name, shift_C in shifts.items():
            if name not in sites:
                raise SmoothingError(f"{name}: has factors but cannot be smoothed in this model")
            site = sites[name]
            for member in site.members:
                self._columns[f"{member}.weight"] = shift_C
            shift_P = site.produced(shift_C)
            self._rows[f"{site.producer}.weight"] = shift_P
            self._rows[f"{site.producer}.bias"] = shift_P

    def apply(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The parameter with its factors folded in, a new tensor; itself if it has none.

        Same dtype, except that float16, too narrow for it, comes back as float32.
        """
        columns, rows = self._columns.get(name), self._rows.get(name)
        if columns is None and rows is None:
            return tensor
        folded = tensor.detach().to(torch.float32)
        if rows is not None:
            f_P = factors(-rows).to(tensor.device)
            folded = folded * f_P.view(-1, *[1] * (tensor.dim() - 1))
        if columns is not None:
            folded = folded * factors(columns).to(tensor.device)
        return folded if tensor.dtype == torch.float16 else folded.to(tensor.dtype)
