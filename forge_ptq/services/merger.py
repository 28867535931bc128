"""StatsMerger: turns the shares of a calibration pass into one set of statistics.

    left_out = await merger.merge.route(round_, pass_, {"share-0": key, ...}, rule, sigma_clip)

With procs = M it is M ranks, each of which reads only the rows of its own sites from every share,
whatever ranks have put them there as columns: a reshard through TorchStore. Ranks judge what they
see (numerics.merge), agree on which shares to leave out, reduce their rows and put them back as
rows of the merged statistics. A share that cannot be read, by any rank, is left out like one that
is judged bad: the caller counts what is left against its quorum.

Merging the same shares again writes the same bytes, so the service may retry after a death.

Shape suffixes: L sites, M ranks of the merger.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from forge_ptq import store, store_io, store_stats
from forge_ptq.numerics.merge import Judgement, judge, reduce, worst
from forge_ptq.numerics.stats import ActivationStats
from forge_ptq.numerics.stats_table import Layout, pack, unpack
from forge_ptq.runtime import ForgeActor, endpoint
from forge_ptq.services.ranks import Ranks
from forge_ptq.store_io import StoreError
from forge_ptq.store_stats import Mark, ShareKey

Shares = dict[str, dict[str, ActivationStats]]
Read = Callable[[], Awaitable[Any]]


class StatsMerger(ForgeActor):
    """See the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self._ranks = Ranks()

    @endpoint
    async def setup(self) -> None:
        """Meet the other ranks."""
        self._ranks = Ranks(self._rank, self._size)
        await asyncio.to_thread(store.prepare)
        await asyncio.to_thread(self._ranks.connect)

    @endpoint
    async def merge(
        self,
        round_: int,
        pass_: int,
        keys: Mapping[str, ShareKey],
        rule: str = "histogram",
        sigma_clip: float = 0.0,
    ) -> dict[str, str]:
        """Merge and store the shares' statistics; returns {share left out: reason}.

        Nothing is stored if none remains. ValueError for an unknown rule or no shares.
        """
        if not keys:
            raise ValueError("merge: there are no shares")
        ranks = self._ranks
        marks, unreadable = await _marks(keys)
        opinions = await asyncio.to_thread(ranks.gather, unreadable)
        unreadable = {share: why for opinion in opinions for share, why in opinion.items()}
        marks = {share: mark for share, mark in marks.items() if share not in unreadable}
        if not marks:
            return dict(sorted(unreadable.items()))
        layout = next(iter(marks.values())).layout
        start, stop = layout.split(ranks.size)[ranks.rank]
        shares, failed = await _rows({s: (keys[s], mark) for s, mark in marks.items()}, start, stop)
        judged = await asyncio.to_thread(judge, shares)
        views = await asyncio.to_thread(ranks.gather, (judged, failed))
        left_out = dict(unreadable)
        for share in sorted(marks):
            broken = [view[1][share] for view in views if share in view[1]]
            reason = broken[0] if broken else _verdict(views, share, sigma_clip)
            if reason is not None:
                left_out[share] = reason
        kept = {share: stats for share, stats in shares.items() if share not in left_out}
        if kept:
            table = {}
            if start < stop:
                merged = await asyncio.to_thread(reduce, kept, rule)
                table = pack(merged, layout.cut(start, stop))
            tokens = sum(marks[share].tokens for share in kept)
            name = f"{socket.gethostname()}:{os.getpid()}"
            mark = Mark(tokens, name, ranks.size, layout, {"shares": sorted(kept), "rule": rule})
            await store_stats.put_merged(round_, pass_, table, mark, ranks.rank, start, stop)
        # Read as a whole only after every rank has put its rows.
        await asyncio.to_thread(ranks.gather, True)
        return dict(sorted(left_out.items()))


def _verdict(views: list[Any], share: str, sigma_clip: float) -> str | None:
    """Why a share is left out, from what all ranks saw of it."""
    opinions: list[Judgement] = [view[0][share] for view in views if share in view[0]]
    return worst(opinions).reason(sigma_clip)


async def _marks(keys: Mapping[str, ShareKey]) -> tuple[dict[str, Mark], dict[str, str]]:
    """Marks of the shares that agree on the model's sites; why of the others."""
    found = await _attempts({share: partial(store_stats.get_mark, keys[share]) for share in keys})
    marks = {share: mark for share, mark in found.items() if isinstance(mark, Mark)}
    refused = {share: str(mark) for share, mark in found.items() if share not in marks}
    layouts = Counter(mark.layout for mark in marks.values())
    usual: Layout | None = max(layouts, key=lambda each: (layouts[each], each.digest), default=None)
    for share, mark in list(marks.items()):
        if mark.layout != usual:
            refused[share] = f"its layers are not those of the others ({mark.layout.digest})"
            del marks[share]
    return marks, refused


async def _rows(
    shares: Mapping[str, tuple[ShareKey, Mark]], start: int, stop: int
) -> tuple[Shares, dict[str, str]]:
    """Statistics of sites start .. stop - 1 of every share; why of those that cannot be read."""
    if start == stop:
        return {}, {}

    async def read(key: ShareKey, mark: Mark) -> dict[str, ActivationStats]:
        table = await store_stats.get_stats(key, mark, start, stop)
        return unpack(table, mark.layout.cut(start, stop))

    found = await _attempts({s: partial(read, key, mark) for s, (key, mark) in shares.items()})
    read_ok = {share: stats for share, stats in found.items() if isinstance(stats, dict)}
    return read_ok, {share: str(error) for share, error in found.items() if share not in read_ok}


async def _attempts(reads: Mapping[str, Read]) -> dict[str, Any]:
    """Result of each read, or the error that it met."""

    async def attempt(read: Read) -> Any:
        try:
            return await read()
        except (StoreError, ValueError) as error:
            return error

    results = await store_io.gather(partial(attempt, reads[share]) for share in sorted(reads))
    return dict(zip(sorted(reads), results, strict=True))
