"""The statistics of a whole model as a handful of flat tensors, and their slices.

A model has hundreds of sites; as tensors of their own they would cost a store hundreds of round
trips. So sites of equal width stack into one matrix, in the order of a ``Layout`` that every rank
derives from the model alone:

=============  ========================  ===========================================
``absmax.C``   [L_C, C] fp32             one row per site of width C
``sum_sq.C``   [L_C, C] fp64             likewise
``histogram``  [L, BINS] int64           one row per site
``scalars``    [L, 3] fp64               tokens, sum of x, non-finite elements
=============  ========================  ===========================================

Two cuts of this table matter. *Columns*: a tensor-parallel rank accounts for ``channel_slice(C)``
of every site and packs narrower matrices; the ranks' matrices side by side are the whole, and
their histograms and scalars, stacked to [ranks, L, ...], are partial sums (of everything but
``tokens``, which all of them saw). *Rows*: a merger rank takes a contiguous range of sites, which
is a contiguous range of rows in every tensor.

Shape suffixes: L sites, C channels, B bins, P tensor-parallel ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from forge_ptq.numerics.stats import BINS, ActivationStats

SCALARS = 3
"""Columns of ``scalars``: tokens, sum, non_finite. fp64 holds counts up to 2^53 exactly."""


def channel_slice(channels: int, rank: int, ranks: int) -> slice:
    """The channels that one of several tensor-parallel ranks accounts for (as torch.chunk)."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}")
    size = -(-channels // ranks)
    return slice(min(rank * size, channels), min((rank + 1) * size, channels))


@dataclass(frozen=True)
class Layout:
    """Names and widths of the sites, in row order."""

    sites: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, stats: Mapping[str, ActivationStats]) -> Layout:
        """The layout of whole (not column-cut) statistics, in their order."""
        return cls(tuple((name, stat.channels) for name, stat in stats.items()))

    @cached_property
    def rows(self) -> dict[int, list[int]]:
        """Per width C, in order of first appearance, the indices of its sites."""
        found: dict[int, list[int]] = {}
        for index, (_, channels) in enumerate(self.sites):
            found.setdefault(channels, []).append(index)
        return found

    @property
    def digest(self) -> str:
        """16 hex digits that differ between layouts; ranks with equal ones can be merged."""
        text = "\n".join(f"{name} {channels}" for name, channels in self.sites)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor of the whole table, by name."""
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for channels, rows in self.rows.items():
            shapes[f"absmax.{channels}"] = ((len(rows), channels), torch.float32)
            shapes[f"sum_sq.{channels}"] = ((len(rows), channels), torch.float64)
        shapes["histogram"] = ((len(self.sites), BINS), torch.int64)
        shapes["scalars"] = ((len(self.sites), SCALARS), torch.float64)
        return shapes

    def cut(self, start: int, stop: int) -> Layout:
        """The layout of sites start .. stop - 1."""
        return Layout(self.sites[start:stop])

    def row_slices(self, start: int, stop: int) -> dict[str, slice]:
        """For every tensor, the rows that sites start .. stop - 1 occupy (maybe none)."""
        slices: dict[str, slice] = {}
        for channels, rows in self.rows.items():
            before = sum(row < start for row in rows)
            inside = sum(start <= row < stop for row in rows)
            slices[f"absmax.{channels}"] = slices[f"sum_sq.{channels}"] = slice(
                before, before + inside
            )
        slices["histogram"] = slices["scalars"] = slice(start, stop)
        return slices

    def split(self, parts: int) -> list[tuple[int, int]]:
        """Contiguous (start, stop) ranges of sites for ``parts`` mergers, about equal in bytes.

        Ranges may be empty when there are more parts than sites.
        """
        costs = [12 * channels + 8 * (BINS + SCALARS) for _, channels in self.sites]
        total, done, cuts = sum(costs), 0, [0]
        for index, cost in enumerate(costs):
            # A boundary falls before the site whose middle lies past it.
            while len(cuts) < parts and (done + cost / 2) * parts >= total * len(cuts):
                cuts.append(index)
            done += cost
        cuts += [len(costs)] * (parts + 1 - len(cuts))
        return list(pairwise(cuts))


def pack(
    stats: Mapping[str, ActivationStats], layout: Layout, rank: int = 0, ranks: int = 1
) -> dict[str, torch.Tensor]:
    """The table of one tensor-parallel rank, whose statistics cover its channel slice.

    ValueError if sites or widths are not those of the layout.
    """
    if set(stats) != {name for name, _ in layout.sites}:
        odd = sorted(set(stats) ^ {name for name, _ in layout.sites})
        raise ValueError(f"statistics and layout differ in {len(odd)} sites, one is {odd[0]}")
    for name, channels in layout.sites:
        part = channel_slice(channels, rank, ranks)
        if stats[name].channels != part.stop - part.start:
            raise ValueError(
                f"{name}: statistics of {stats[name].channels} channels, but rank {rank} of "
                f"{ranks} accounts for {part.stop - part.start} of {channels}"
            )
    ordered = [stats[name] for name, _ in layout.sites]
    tensors: dict[str, torch.Tensor] = {}
    for channels, rows in layout.rows.items():
        tensors[f"absmax.{channels}"] = torch.stack([ordered[row].absmax_C for row in rows])
        tensors[f"sum_sq.{channels}"] = torch.stack([ordered[row].sum_sq_C for row in rows])
    tensors["histogram"] = torch.stack([stat.histogram_B for stat in ordered])
    tensors["scalars"] = torch.tensor(
        [[stat.tokens, stat.sum, stat.non_finite] for stat in ordered], dtype=torch.float64
    )
    return tensors


def unpack(tensors: Mapping[str, torch.Tensor], layout: Layout) -> dict[str, ActivationStats]:
    """Statistics of every site, from whole matrices; views of the tensors where possible.

    histogram and scalars are [L, ...] or the stacked partial sums [P, L, ...] of P
    tensor-parallel ranks. ValueError if a tensor is missing or misshapen, or if the ranks did not
    see the same number of tokens.
    """
    histogram, scalars = tensors["histogram"], tensors["scalars"]
    if histogram.dim() == 3:
        histogram = histogram.sum(0)
    if scalars.dim() == 3:
        tokens_PL = scalars[:, :, 0]
        if not bool((tokens_PL == tokens_PL[:1]).all()):
            raise ValueError("the tensor-parallel ranks of a share saw different numbers of tokens")
        scalars = torch.cat([scalars[0, :, :1], scalars[:, :, 1:].sum(0)], dim=1)
    found = {**tensors, "histogram": histogram, "scalars": scalars}
    for name, (shape, dtype) in layout.shapes().items():
        if name not in found:
            raise ValueError(f"statistics without {name}; there are {sorted(tensors)}")
        if tuple(found[name].shape) != shape or found[name].dtype != dtype:
            raise ValueError(
                f"statistics {name}: expected {dtype} {list(shape)}, got {found[name].dtype} "
                f"{list(found[name].shape)}"
            )
    place = {row: number for rows in layout.rows.values() for number, row in enumerate(rows)}
    result: dict[str, ActivationStats] = {}
    for index, (name, channels) in enumerate(layout.sites):
        tokens, total, non_finite = scalars[index].tolist()
        result[name] = ActivationStats(
            tokens=int(tokens),
            absmax_C=tensors[f"absmax.{channels}"][place[index]],
            sum_sq_C=tensors[f"sum_sq.{channels}"][place[index]],
            sum=total,
            histogram_B=histogram[index],
            non_finite=int(non_finite),
        )
    return result
