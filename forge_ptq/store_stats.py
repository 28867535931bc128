"""Statistics of a calibration in the store: replicas' shares, the merged ones, the calibration.

    ptq_stats.r{round}.p{pass}.s{share}.a{attempt}.c{batches}.{tensor}   a share's checkpoint
    ptq_merged.r{round}.p{pass}.{tensor}                                 what the merger makes
    ptq_calibration.r{round}.{tensor}                                    the result
    ptq_round                                                            number of the last round

Each of the first three is complete once its markers (``__mark__.{rank}``, JSON) are there, one of
every writing rank, put after its last tensor. Every attempt at a share writes under keys of its
own, so what a dead writer leaves behind is garbage that nobody reads, and never torn.

Statistics are the tables of numerics.stats_table, put as slices of distributed tensors:

- by P tensor-parallel ranks of a replica: ``absmax.C`` and ``sum_sq.C`` [L_C, C] as columns
  (Shard(1)), ``histogram`` [P, L, BINS] and ``scalars`` [P, L, 3] one layer each (Shard(0)), since
  TorchStore keeps no partial sums;
- read by M merger ranks as rows, each only those of its sites, whatever P was;
- merged ones put by the merger ranks as rows (Shard(0)) and read whole.

TorchStore's own DTensor path would need a process group among the ranks and equal shards; its
slices need neither.

Shape suffixes: L sites, C channels, B bins, P ranks of a replica, M ranks of the merger.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from forge_ptq import store_io as io
from forge_ptq.numerics.calibration import Calibration, CalibrationFormatError
from forge_ptq.numerics.stats import ActivationStats
from forge_ptq.numerics.stats_table import Layout, channel_slice, unpack
from forge_ptq.store_io import StoreError

_STATS, _MERGED, _CALIBRATION = "ptq_stats", "ptq_merged", "ptq_calibration"
_ROUND = "ptq_round"
_MARK = "__mark__"

Table = dict[str, torch.Tensor]


@dataclass(frozen=True, order=True)
class ShareKey:
    """Names one checkpoint of one share; orders by how far it got."""

    round: int
    pass_: int
    share: int
    batches: int
    """Batches of the share that are in it."""
    attempt: int

    @property
    def prefix(self) -> str:
        """Of all its keys."""
        return f"{share_prefix(self.round, self.pass_, self.share)}.{self.leaf}"

    @property
    def leaf(self) -> str:
        """The part of the prefix that differs between checkpoints of one share."""
        return f"a{self.attempt:03d}.c{self.batches:06d}"


@dataclass(frozen=True)
class Mark:
    """What a writer says about its statistics."""

    tokens: int
    replica: str
    ranks: int
    """Tensor-parallel ranks that wrote slices."""
    layout: Layout
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Inverse of ``from_json``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Mark:
        """Raises KeyError or ValueError for anything but a mark."""
        record = json.loads(text)
        sites = tuple((name, int(width)) for name, width in record.pop("layout")["sites"])
        return cls(layout=Layout(sites), **record)


def share_prefix(round_: int, pass_: int, share: int) -> str:
    """Of the keys of all attempts at one share."""
    return f"{_STATS}.r{round_:08d}.p{pass_}.s{share:05d}"


async def put_stats(key: ShareKey, table: Table, mark: Mark, rank: int = 0) -> None:
    """Put one rank's part (``stats_table.pack(stats, layout, rank, ranks)``); its mark last.

    With all ranks' marks in place the checkpoint exists for readers.
    """
    await io.gather(_puts(key.prefix, table, mark, rank))
    await io.put(f"{key.prefix}.{_MARK}.{rank:05d}", mark.to_json())


def _puts(prefix: str, table: Table, mark: Mark, rank: int) -> list[Any]:
    """One put for each tensor of a rank's table."""
    puts = []
    for name, (shape, _) in mark.layout.shapes().items():
        local = table[name]
        if name in ("histogram", "scalars"):
            whole: tuple[int, ...] = (mark.ranks, *shape)
            offsets: tuple[int, ...] = (rank, 0, 0)
            local = local.unsqueeze(0)
        else:
            whole = shape
            offsets = (0, channel_slice(shape[1], rank, mark.ranks).start)
        puts.append(
            partial(
                io.put_slice,
                f"{prefix}.{name}",
                local,
                offsets=offsets,
                shape=whole,
                rank=rank,
                ranks=mark.ranks,
            )
        )
    return puts


async def get_mark(key: ShareKey) -> Mark:
    """The mark of rank 0; StoreError unless all ranks have put theirs."""
    return await _mark(key.prefix)


async def _mark(prefix: str) -> Mark:
    names = [name for name in await io.keys(prefix) if f".{_MARK}." in name]
    first = f"{prefix}.{_MARK}.{0:05d}"
    if first not in names:
        raise StoreError(f"get {prefix}: not complete or dropped (no mark of rank 0)")
    mark = Mark.from_json(await io.get(first))
    if len(names) < mark.ranks:
        raise StoreError(f"get {prefix}: marks of {len(names)} ranks of {mark.ranks}")
    return mark


async def find_checkpoint(round_: int, pass_: int, share: int) -> tuple[ShareKey, Mark] | None:
    """The furthest complete checkpoint of a share, by whichever attempt; None if there is none."""
    prefix = share_prefix(round_, pass_, share)
    found: dict[ShareKey, int] = {}
    for name in await io.keys(prefix):
        if f".{_MARK}." not in name:
            continue
        attempt, batches = name.removeprefix(f"{prefix}.").split(".")[:2]
        key = ShareKey(round_, pass_, share, int(batches[1:]), int(attempt[1:]))
        found[key] = found.get(key, 0) + 1
    for key in sorted(found, reverse=True):
        if found[key] == await _ranks(key.prefix):
            return key, await get_mark(key)
    return None


async def _ranks(prefix: str) -> int:
    """Ranks that should have written, as any of their marks says; 0 without rank 0's mark."""
    first = f"{prefix}.{_MARK}.{0:05d}"
    return Mark.from_json(await io.get(first)).ranks if await io.exists(first) else 0


async def get_stats(key: ShareKey, mark: Mark, start: int = 0, stop: int | None = None) -> Table:
    """Rows of sites start .. stop - 1 of a share, histogram and scalars as [P, L, ...].

    The result fits ``stats_table.unpack`` with ``mark.layout.cut(start, stop)``. Only these rows
    travel. Raises StoreError for a checkpoint that is gone or incomplete.
    """
    layout = mark.layout
    stop = len(layout.sites) if stop is None else stop
    rows = layout.row_slices(start, stop)
    gets = {}
    for name, (shape, dtype) in layout.shapes().items():
        first, count = rows[name].start, rows[name].stop - rows[name].start
        partials = name in ("histogram", "scalars")
        if count == 0 and not partials:
            continue
        gets[name] = partial(
            io.get_slice,
            f"{key.prefix}.{name}",
            offsets=(0, first, 0) if partials else (first, 0),
            local_shape=(mark.ranks, count, shape[1]) if partials else (count, shape[1]),
            shape=(mark.ranks, *shape) if partials else shape,
            dtype=dtype,
        )
    return dict(zip(gets, await io.gather(gets.values()), strict=True))


async def drop_checkpoints(round_: int, pass_: int, share: int, attempt: int, keep: int) -> int:
    """Delete all but the keep furthest checkpoints of one attempt; returns keys deleted."""
    prefix = f"{share_prefix(round_, pass_, share)}.a{attempt:03d}"
    names = await io.keys(prefix)
    counts = sorted({name.removeprefix(f"{prefix}.").split(".")[0] for name in names})
    old = set(counts[:-keep]) if keep else set(counts)
    gone = [name for name in names if name.removeprefix(f"{prefix}.").split(".")[0] in old]
    return await io.purge(gone)


def _merged_prefix(round_: int, pass_: int) -> str:
    return f"{_MERGED}.r{round_:08d}.p{pass_}"


async def put_merged(
    round_: int, pass_: int, table: Table, mark: Mark, rank: int, start: int, stop: int
) -> None:
    """Put one merger rank's rows (sites start .. stop - 1); its mark last.

    table: ``stats_table.pack`` of those sites (tensors without rows may be missing). mark: layout
    of all sites, ranks of the merger.
    """
    prefix, rows = _merged_prefix(round_, pass_), mark.layout.row_slices(start, stop)
    puts = []
    for name, (shape, dtype) in mark.layout.shapes().items():
        local = table.get(name, torch.empty((0, shape[1]), dtype=dtype))
        put = partial(io.put_slice, f"{prefix}.{name}", local, offsets=(rows[name].start, 0))
        puts.append(partial(put, shape=shape, rank=rank, ranks=mark.ranks))
    await io.gather(puts)
    await io.put(f"{prefix}.{_MARK}.{rank:05d}", mark.to_json())


async def get_merged(round_: int, pass_: int) -> dict[str, ActivationStats]:
    """Merged statistics of every site; StoreError unless all merger ranks are done."""
    prefix = _merged_prefix(round_, pass_)
    mark = await _mark(prefix)
    gets = {
        name: partial(
            io.get_slice,  # asked for as a whole, TorchStore stumbles over ranks without rows
            f"{prefix}.{name}",
            offsets=(0, 0),
            local_shape=shape,
            shape=shape,
            dtype=dtype,
        )
        for name, (shape, dtype) in mark.layout.shapes().items()
    }
    return unpack(dict(zip(gets, await io.gather(gets.values()), strict=True)), mark.layout)


def _calibration_prefix(round_: int) -> str:
    return f"{_CALIBRATION}.r{round_:08d}"


async def put_calibration(calibration: Calibration) -> None:
    """Store a calibration; it is there for readers once this returns."""
    prefix = _calibration_prefix(calibration.round)
    tensors, text = calibration.to_tensors()
    await io.gather(partial(io.put, f"{prefix}.{name}", t) for name, t in tensors.items())
    record = {"text": text, "tensors": list(tensors)}
    await io.put(f"{prefix}.{_MARK}.{0:05d}", json.dumps(record))


async def get_calibration(round_: int) -> Calibration:
    """The calibration of one round; StoreError if it is not there, CalibrationFormatError if it
    cannot be read."""
    prefix = _calibration_prefix(round_)
    marker = f"{prefix}.{_MARK}.{0:05d}"
    if not await io.exists(marker):
        raise StoreError(f"get {prefix}: no such calibration, not complete or dropped")
    text = await io.get(marker)
    try:
        record = json.loads(text)
        names, described = list(record["tensors"]), record["text"]
    except (KeyError, TypeError, ValueError) as error:
        raise CalibrationFormatError(f"{marker} is no mark of a calibration: {error!r}") from error
    tensors = await io.gather(partial(io.get, f"{prefix}.{name}") for name in names)
    return Calibration.from_tensors(dict(zip(names, tensors, strict=True)), described)


async def calibration_rounds() -> list[int]:
    """Rounds whose calibration is complete, ascending."""
    names = await io.keys(_CALIBRATION)
    return sorted(_round(name) for name in names if f".{_MARK}." in name)


async def claim_round() -> int:
    """The number of a new round, higher than any before: no two rounds share a key, whoever ran
    the ones before and whatever became of them."""
    last = json.loads(await io.get(_ROUND)) if await io.exists(_ROUND) else 0
    await io.put(_ROUND, json.dumps(last + 1))
    return int(last) + 1


async def continue_rounds(last: int) -> None:
    """Count rounds on from ``last``, the round of a calibration that an earlier session made."""
    await io.put(_ROUND, json.dumps(last))


def _round(name: str) -> int:
    return int(name.split(".")[1].removeprefix("r"))


async def drop_shares(round_: int, pass_: int) -> int:
    """Delete all attempts at all shares of a pass; returns keys deleted."""
    return await io.purge(await io.keys(f"{_STATS}.r{round_:08d}.p{pass_}"))


async def drop_rounds(before: int, keep: int) -> int:
    """Delete shares and merged statistics of rounds lower than before, what stragglers added
    late included, and all but the keep newest calibrations; returns keys deleted."""
    names = [n for root in (_STATS, _MERGED) for n in await io.keys(root)]
    gone = [name for name in names if _round(name) < before]
    old = set((await calibration_rounds())[:-keep])
    gone += [name for name in await io.keys(_CALIBRATION) if _round(name) in old]
    return await io.purge(gone)
