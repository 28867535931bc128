"""Statistics in a real store: slices by columns, read by rows; torn ones invisible; retention."""

import pytest
import pytest_asyncio
import torch

from forge_ptq import runtime, store, store_io, store_stats
from forge_ptq.numerics.calibration import Calibration, CalibrationFormatError
from forge_ptq.numerics.stats import ActivationStats, measure
from forge_ptq.numerics.stats_table import Layout, channel_slice, pack, unpack
from forge_ptq.store_io import StoreError
from forge_ptq.store_stats import Mark, ShareKey

pytestmark = pytest.mark.asyncio(loop_scope="module")

WIDTHS = {"q": 7, "gate": 7, "down": 19, "o": 5, "odd": 1}
"""No width is a multiple of the ranks; with 4 ranks `odd` has ranks without a channel."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def running_store():
    await runtime.init_provisioner()
    await store.initialize()
    yield
    await store.shutdown()
    await runtime.shutdown()


def whole(seed: int = 0) -> dict[str, ActivationStats]:
    torch.manual_seed(seed)
    return {name: measure(torch.randn(11, width) * 50) for name, width in WIDTHS.items()}


def cut(stats, rank, ranks):
    """What one tensor-parallel rank counts: its channels alone."""
    torch.manual_seed(0)
    inputs = {name: torch.randn(11, width) * 50 for name, width in WIDTHS.items()}
    return {n: measure(x[:, channel_slice(x.shape[1], rank, ranks)]) for n, x in inputs.items()}


async def put_share(key, ranks, only=None, tokens=11, replica="host:1"):
    layout = Layout.of(whole())
    mark = Mark(tokens, replica, ranks, layout)
    for rank in range(ranks) if only is None else only:
        table = pack(cut(whole(), rank, ranks), layout, rank, ranks)
        await store_stats.put_stats(key, table, mark, rank)
    return mark


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, stats in expected.items():
        got = found[name]
        assert got.tokens == stats.tokens
        assert got.non_finite == stats.non_finite
        assert torch.equal(got.absmax_C, stats.absmax_C)
        assert torch.equal(got.histogram_B, stats.histogram_B)
        torch.testing.assert_close(got.sum_sq_C, stats.sum_sq_C, rtol=1e-12, atol=0)
        assert got.sum == pytest.approx(stats.sum, rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 4])
async def test_columns_of_any_ranks_read_as_rows_of_any_mergers(ranks):
    key = ShareKey(1, 0, ranks, batches=3, attempt=0)
    await put_share(key, ranks)
    mark = await store_stats.get_mark(key)
    assert (mark.ranks, mark.tokens) == (ranks, 11)
    expected = whole()
    assert_same(unpack(await store_stats.get_stats(key, mark), mark.layout), expected)
    for mergers in (2, 3, 7):
        found: dict[str, ActivationStats] = {}
        for start, stop in mark.layout.split(mergers):
            if start < stop:
                table = await store_stats.get_stats(key, mark, start, stop)
                found |= unpack(table, mark.layout.cut(start, stop))
        assert_same(found, expected)


async def test_a_slice_travels_without_the_tensor_around_it():
    from torchstore.transport.buffers import MonarchTransportBuffer
    from torchstore.transport.pipe import Request, TensorSlice

    await store_io.put_slice(
        "probe.slices", torch.ones(1000, 100), offsets=(0, 0), shape=(1000, 100), rank=0, ranks=1
    )
    client = await store_io.ts().client()
    volume, _ = client.strategy.select_storage_volume()
    part = TensorSlice((10, 0), (0,), (1000, 100), (2, 100), (1,))
    request = Request.from_tensor_slice(part)
    answer = await volume.get.call_one("probe.slices", MonarchTransportBuffer(), request)
    assert answer.tensor.shape == (2, 100)
    assert answer.tensor.untyped_storage().nbytes() == 2 * 100 * 4


async def test_torn_checkpoints_are_invisible_and_the_furthest_complete_one_is_found():
    assert await store_stats.find_checkpoint(2, 0, 0) is None
    early = ShareKey(2, 0, 0, batches=2, attempt=0)
    late = ShareKey(2, 0, 0, batches=4, attempt=1)
    torn = ShareKey(2, 0, 0, batches=6, attempt=0)
    await put_share(early, 2)
    await put_share(torn, 2, only=[1])
    found = await store_stats.find_checkpoint(2, 0, 0)
    assert found is not None
    assert found[0] == early
    with pytest.raises(StoreError, match="no mark of rank 0"):
        await store_stats.get_mark(torn)
    await put_share(late, 4)
    await put_share(ShareKey(2, 0, 0, batches=5, attempt=2), 2, only=[0])
    found = await store_stats.find_checkpoint(2, 0, 0)
    assert found is not None
    assert (found[0], found[1].ranks) == (late, 4)
    with pytest.raises(StoreError, match="marks of 1 ranks of 2"):
        await store_stats.get_mark(ShareKey(2, 0, 0, batches=5, attempt=2))
    assert await store_stats.find_checkpoint(2, 1, 0) is None  # another pass


async def test_slices_without_a_mark_are_no_checkpoint():
    key, layout = ShareKey(3, 0, 0, batches=1, attempt=0), Layout.of(whole())
    table = pack(whole(), layout)
    puts = store_stats._puts(key.prefix, table, Mark(11, "r", 1, layout), 0)
    await store_io.gather(puts)
    assert await store_stats.find_checkpoint(3, 0, 0) is None


async def test_only_the_newest_checkpoints_of_an_attempt_are_kept():
    for batches in (1, 2, 3, 4):
        await put_share(ShareKey(4, 0, 0, batches, attempt=0), 1)
    other = ShareKey(4, 0, 0, 1, attempt=1)
    await put_share(other, 1)
    assert await store_stats.drop_checkpoints(4, 0, 0, attempt=0, keep=3) > 0
    with pytest.raises(StoreError):
        await store_stats.get_mark(ShareKey(4, 0, 0, 1, attempt=0))
    for batches in (2, 3, 4):
        await store_stats.get_mark(ShareKey(4, 0, 0, batches, attempt=0))
    await store_stats.get_mark(other)
    assert await store_stats.drop_checkpoints(4, 0, 0, attempt=0, keep=3) == 0


@pytest.mark.parametrize("mergers", [1, 3, 8])
async def test_merged_statistics_put_by_rows_are_read_whole(mergers):
    stats, layout = whole(), Layout.of(whole())
    mark = Mark(11, "merger", mergers, layout)
    names = list(stats)
    for rank, (start, stop) in enumerate(layout.split(mergers)):
        with pytest.raises(StoreError, match="not complete" if rank == 0 else f"{rank} ranks of"):
            await store_stats.get_merged(5, mergers)
        part = {name: stats[name] for name in names[start:stop]}
        table = pack(part, layout.cut(start, stop)) if part else {}
        await store_stats.put_merged(5, mergers, table, mark, rank, start, stop)
    assert_same(await store_stats.get_merged(5, mergers), stats)


async def test_calibrations_and_retention_of_rounds():
    assert await store_stats.calibration_rounds() == []
    for number in (11, 12, 13):
        calibration = Calibration(
            round=number,
            policy_version=number,
            layers={"q": "int8_static"},
            absmax={"q": float(number)},
            shift={"q": torch.tensor([1, -2, 0, 3, 0, 0, 1], dtype=torch.int8)},
            stats=whole(number),
            tokens=11,
            contributors=("host:1",),
        )
        await store_stats.put_calibration(calibration)
    for pass_ in (0, 1):
        await put_share(ShareKey(13, pass_, 0, 1, 0), 1)
    assert await store_stats.calibration_rounds() == [11, 12, 13]
    found = await store_stats.get_calibration(12)
    assert found.absmax == {"q": 12.0}
    assert torch.equal(found.shift["q"], calibration.shift["q"])
    assert_same(found.stats, whole(12))
    with pytest.raises(StoreError, match="no such calibration"):
        await store_stats.get_calibration(14)
    assert await store_stats.drop_rounds(before=13, keep=2) > 0
    assert await store_stats.calibration_rounds() == [12, 13]
    assert await store_stats.find_checkpoint(1, 0, 1) is None  # by an earlier test
    assert await store_stats.drop_rounds(before=13, keep=5) == 0
    assert await store_stats.drop_shares(13, 0) > 0
    assert await store_stats.find_checkpoint(13, 0, 0) is None
    assert await store_stats.find_checkpoint(13, 1, 0) is not None
    await store_io.put("ptq_calibration.r00000012.__mark__.00000", '{"tensors": []}')
    with pytest.raises(CalibrationFormatError, match="no mark of a calibration"):
        await store_stats.get_calibration(12)


async def test_no_two_rounds_have_one_number():
    assert [await store_stats.claim_round() for _ in range(3)] == [1, 2, 3]
