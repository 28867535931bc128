"""Ranks of the merger stay together whatever happens on one of them."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_ptq import store_stats
from forge_ptq.numerics.stats import measure
from forge_ptq.numerics.stats_table import Layout, pack
from forge_ptq.services import merger
from forge_ptq.services.merger import MergeError
from forge_ptq.store_io import StoreError
from forge_ptq.store_stats import Mark, ShareKey

WAIT_S = 20.0
STATS = {name: measure(torch.randn(5, width)) for name, width in {"q": 3, "o": 4}.items()}
KEY = ShareKey(1, 0, 0, batches=1, attempt=0)


def ranks(size: int) -> list[Any]:
    """Ranks that meet in threads; a rank that is missing breaks the gather of the others."""
    barrier, box = threading.Barrier(size), [None] * size

    def gather(rank: int, value: Any) -> list[Any]:
        box[rank] = value
        barrier.wait(WAIT_S)
        values = list(box)
        barrier.wait(WAIT_S)
        return values

    def one(rank: int) -> Any:
        return SimpleNamespace(rank=rank, size=size, gather=lambda value: gather(rank, value))

    return [one(rank) for rank in range(size)]


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """A store of one share; what each rank put as merged. A value put there before is raised."""
    put: dict[int, Any] = {}

    async def get_mark(key: ShareKey) -> Mark:
        return Mark(5, "r", 1, Layout.of(STATS))

    async def get_stats(key: ShareKey, mark: Mark, start: int, stop: int) -> Any:
        names = list(STATS)[start:stop]
        table = pack({name: STATS[name] for name in names}, mark.layout.cut(start, stop))
        partials = ("histogram", "scalars")
        return {n: t.unsqueeze(0) if n in partials else t for n, t in table.items()}

    async def put_merged(
        round_: int, pass_: int, table: Any, mark: Mark, rank: int, *_: int
    ) -> None:
        if isinstance(put.get(rank), Exception):
            raise put.pop(rank)
        put[rank] = (table, mark.tokens)

    for function in (get_mark, get_stats, put_merged):
        monkeypatch.setattr(store_stats, function.__name__, function)
    return put


async def merge(group: list[Any], rule: str = "histogram") -> list[Any]:
    calls = (merger.merge(each, 1, 0, {"share-0": KEY}, rule, 0.0) for each in group)
    async with asyncio.timeout(WAIT_S):
        return await asyncio.gather(*calls, return_exceptions=True)


async def test_an_error_on_one_rank_is_raised_on_all_and_the_next_merge_works(
    merged: dict[int, Any],
) -> None:
    group = ranks(2)
    merged[0] = StoreError("the volume is gone")
    errors = await merge(group)
    assert [type(error) for error in errors] == [MergeError, MergeError]
    assert {str(error) for error in errors} == {"rank 0: StoreError: the volume is gone"}
    assert await merge(group) == [{}, {}]
    assert sorted(merged) == [0, 1]


async def test_an_unknown_rule_is_an_error_of_every_rank(merged: dict[int, Any]) -> None:
    errors = await merge(ranks(2), rule="luck")
    assert all(isinstance(error, MergeError) and "luck" in str(error) for error in errors)
    assert not merged


async def test_a_rank_without_rows_marks_its_part_all_the_same(merged: dict[int, Any]) -> None:
    assert await merge(ranks(3)) == [{}, {}, {}]
    assert {rank: tokens for rank, (_, tokens) in merged.items()} == {0: 5, 1: 5, 2: 5}
    assert sum(bool(table) for table, _ in merged.values()) == 2
