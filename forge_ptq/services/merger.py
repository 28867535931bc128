"""StatsMerger: turns the shares of a calibration pass into one set of statistics.

    left_out = await merger.merge.route(round_, pass_, {"share-0": key, ...}, rule, sigma_clip)

With procs = M it is M ranks, each of which reads only the rows of its own sites from every share,
whatever ranks have put them there as columns: a reshard through TorchStore. Ranks judge what they
see (numerics.merge), agree on which shares to leave out, reduce their rows and put them back as
rows of the merged statistics. A share that cannot be read, by any rank, is left out like one that
is judged bad: the caller counts what is left against its quorum.

Merging the same shares again writes the same bytes, so the service may retry after a death. What
goes wrong on one rank is raised on all of them: none may be left waiting for another one.

Shape suffixes: L sites, M ranks of the merger.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from forge_ptq import store, store_io, store_stats
from forge_ptq.numerics.merge import Judgement, judge, reduce, worst
from forge_ptq.numerics.stats import ActivationStats
from forge_ptq.numerics.stats_table import Layout, pack, unpack
from forge_ptq.runtime import ForgeActor, endpoint
from forge_ptq.services.ranks import Ranks
from forge_ptq.store_io import StoreError
from forge_ptq.store_stats import Mark, ShareKey

log = logging.getLogger(__name__)

T = TypeVar("T")
Shares = dict[str, dict[str, ActivationStats]]
Read = Callable[[], Awaitable[Any]]


class MergeError(RuntimeError):
    """A merge that one of the ranks could not do; raised on all of them."""


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

        Nothing is stored if none remains. ValueError for no shares; MergeError on all ranks if
        one of them cannot do its part, as for an unknown rule.
        """
        if not keys:
            raise ValueError("merge: there are no shares")
        return await merge(self._ranks, round_, pass_, keys, rule, sigma_clip)


async def merge(
    ranks: Ranks,
    round_: int,
    pass_: int,
    keys: Mapping[str, ShareKey],
    rule: str,
    sigma_clip: float,
) -> dict[str, str]:
    """What ``StatsMerger.merge`` does on one rank; all ranks at the same time."""
    marks: dict[str, Mark] = {}

    async def look_up() -> dict[str, str]:
        """Why some shares are not there. Only this travels."""
        found, refused = await _marks(keys)
        marks.update(found)
        return refused

    opinions = await together(ranks, look_up())
    unreadable = {share: why for opinion in opinions for share, why in opinion.items()}
    for share in unreadable:
        marks.pop(share, None)
    if not marks:
        return dict(sorted(unreadable.items()))
    layout = next(iter(marks.values())).layout
    start, stop = layout.split(ranks.size)[ranks.rank]
    shares: Shares = {}

    async def look() -> tuple[dict[str, Judgement], dict[str, str]]:
        """Judgements of the shares, and why some could not be read."""
        read, failed = await _rows({s: (keys[s], mark) for s, mark in marks.items()}, start, stop)
        shares.update(read)
        return await asyncio.to_thread(judge, shares), failed

    views = await together(ranks, look())
    left_out = dict(unreadable)
    for share in sorted(marks):
        broken = [view[1][share] for view in views if share in view[1]]
        reason = broken[0] if broken else _verdict(views, share, sigma_clip)
        if reason is not None:
            left_out[share] = reason

    async def put() -> None:
        kept = [share for share in sorted(marks) if share not in left_out]
        if not kept:
            return
        table = {}
        if start < stop:  # with more ranks than sites some have no row, but a mark all the same
            merged = await asyncio.to_thread(reduce, {s: shares[s] for s in kept}, rule)
            table = pack(merged, layout.cut(start, stop))
        tokens = sum(marks[share].tokens for share in kept)
        name = f"{socket.gethostname()}:{os.getpid()}"
        mark = Mark(tokens, name, ranks.size, layout, {"shares": kept, "rule": rule})
        await store_stats.put_merged(round_, pass_, table, mark, ranks.rank, start, stop)

    # Read as a whole only after every rank has put its rows.
    await together(ranks, put())
    return dict(sorted(left_out.items()))


async def together(ranks: Ranks, step: Awaitable[T]) -> list[T]:
    """Every rank's result of a step, on all of them; MergeError on all of them if one raised."""
    result: Any = None
    problem: str | None = None
    try:
        result = await step
    except Exception as error:
        log.exception("rank %d of the merger", ranks.rank)
        problem = f"rank {ranks.rank}: {type(error).__name__}: {error}"
    outcomes = await asyncio.to_thread(ranks.gather, (result, problem))
    problems = [problem for _, problem in outcomes if problem is not None]
    if problems:
        raise MergeError("; ".join(problems))
    return [result for result, _ in outcomes]


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
