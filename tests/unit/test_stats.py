"""Statistics, their bins and their table, against NumPy and against plain loops."""

import numpy as np
import pytest
import torch

from forge_ptq.numerics.plan import sites_of
from forge_ptq.numerics.stats import BINS, ActivationStats, bin_edges, bin_index, measure, merge_all
from forge_ptq.numerics.stats_table import Layout, channel_slice, pack, unpack


def sample(tokens: int, channels: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x_TC = torch.randn(tokens, channels, generator=generator)
    return (x_TC * 4 ** torch.randn(channels, generator=generator)).to(dtype)


def assert_same(a: ActivationStats, b: ActivationStats) -> None:
    """Equal to the last count; sums of floats within rounding."""
    assert (a.tokens, a.non_finite) == (b.tokens, b.non_finite)
    assert torch.equal(a.absmax_C, b.absmax_C)
    assert torch.equal(a.histogram_B, b.histogram_B)
    torch.testing.assert_close(a.sum_sq_C, b.sum_sq_C, rtol=1e-6, atol=1e-12)
    scale = float(a.sum_sq_C.sum()) ** 0.5 + 1e-12
    assert abs(a.sum - b.sum) <= 1e-5 * scale * max(1, a.count) ** 0.5


def test_edges_are_the_bit_pattern():
    edges = bin_edges()
    assert edges.shape == (BINS + 1,)
    assert edges[0] == 2.0**-16
    assert edges[-1] == 2.0**16
    assert edges[128] == 1.0
    assert edges[129] == 1.125
    assert torch.equal(edges.bfloat16().double(), edges)


def test_bins_match_a_search_over_the_edges():
    edges = bin_edges().numpy()
    x = torch.cat([sample(64, 257).flatten(), torch.from_numpy(edges).float()])
    x = torch.cat([x, -x, torch.tensor([0.0, -0.0, 1e-30, 3e38, 65536.0, 2.0**-140])])
    expected = np.clip(np.searchsorted(edges, x.abs().double().numpy(), "right") - 1, 0, BINS - 1)
    assert np.array_equal(bin_index(x).numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_measure_against_numpy(dtype):
    x_TC = sample(50, 37, dtype=dtype)
    stats = measure(x_TC)
    x = x_TC.double().numpy()
    assert stats.tokens == 50
    assert stats.count == x.size
    assert np.array_equal(stats.absmax_C.double().numpy(), np.abs(x).max(0))
    np.testing.assert_allclose(stats.sum_sq_C.numpy(), (x**2).sum(0), rtol=1e-12)
    assert stats.absmax == np.abs(x).max()
    assert stats.mean == pytest.approx(x.mean(), rel=1e-9)
    assert stats.mean_square == pytest.approx((x**2).mean(), rel=1e-9)


def test_non_finite_elements_are_counted_and_nothing_else():
    x_TC = sample(9, 5)
    x_TC[2, 3], x_TC[4, 0], x_TC[4, 1] = float("nan"), float("inf"), -float("inf")
    clean_TC = torch.where(torch.isfinite(x_TC), x_TC, 0.0)
    stats, clean = measure(x_TC), measure(clean_TC)
    assert stats.non_finite == 3
    assert stats.count == 42
    assert torch.equal(stats.absmax_C, clean.absmax_C)
    assert stats.sum == pytest.approx(clean.sum)
    assert int(clean.histogram_B[0] - stats.histogram_B[0]) == 3


def test_merging_any_split_in_any_order_is_one_pass():
    x_TC = sample(101, 33, seed=1)
    whole = measure(x_TC)
    parts = [measure(part) for part in x_TC.split([1, 0, 40, 60])]
    assert_same(merge_all(parts, 33), whole)
    assert_same(merge_all(reversed(parts), 33), whole)
    assert_same(parts[0] + (parts[1] + (parts[2] + parts[3])), whole)
    assert parts[0].tokens == 1


def test_empty_statistics_are_neutral_and_do_not_divide_by_zero():
    empty = ActivationStats.empty(3)
    assert (empty.mean, empty.mean_square, empty.absmax, empty.count) == (0.0, 0.0, 0.0, 0)
    assert_same(empty + measure(sample(4, 3)), measure(sample(4, 3)))
    assert_same(measure(torch.zeros(0, 3)), empty)
    with pytest.raises(ValueError, match="3 and of 4"):
        empty.merge(ActivationStats.empty(4))


WIDTHS = {"a.q_proj": 6, "a.o_proj": 6, "a.down_proj": 16, "b.q_proj": 6, "b.down_proj": 16}


def model_stats(seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: sample(7, c, seed + i) for i, (name, c) in enumerate(WIDTHS.items())}


def test_pack_and_unpack_are_inverse():
    stats = {name: measure(x) for name, x in model_stats().items()}
    layout = Layout.of(stats)
    tensors = pack(stats, layout)
    assert {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()} == layout.shapes()
    back = unpack(tensors, layout)
    assert list(back) == list(stats)
    for name, stat in stats.items():
        assert_same(back[name], stat)
        assert back[name].sum == stat.sum


@pytest.mark.parametrize("ranks", [2, 4])
def test_columns_of_tensor_parallel_ranks_assemble(ranks):
    inputs = model_stats()
    whole = {name: measure(x) for name, x in inputs.items()}
    layout = Layout.of(whole)
    parts = []
    for rank in range(ranks):
        cut = {n: measure(x[:, channel_slice(x.shape[1], rank, ranks)]) for n, x in inputs.items()}
        parts.append(pack(cut, layout, rank, ranks))
    tensors = {
        name: torch.stack([part[name] for part in parts])
        if name in ("histogram", "scalars")
        else torch.cat([part[name] for part in parts], dim=1)
        for name in parts[0]
    }
    for name, stat in unpack(tensors, layout).items():
        assert_same(stat, whole[name])
    tensors["scalars"][1, 0, 0] += 1
    with pytest.raises(ValueError, match="different numbers of tokens"):
        unpack(tensors, layout)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 9])
def test_row_slices_cover_everything_once(parts):
    stats = {name: measure(x) for name, x in model_stats().items()}
    layout = Layout.of(stats)
    tensors = pack(stats, layout)
    seen: dict[str, ActivationStats] = {}
    ranges = layout.split(parts)
    assert len(ranges) == parts
    for start, stop in ranges:
        rows = layout.row_slices(start, stop)
        cut = {name: tensors[name][rows[name]] for name in tensors}
        piece = unpack(
            {n: t for n, t in cut.items() if len(t)} | _tables(cut), layout.cut(start, stop)
        )
        assert not set(seen) & set(piece)
        seen |= piece
    assert list(seen) == list(stats)
    for name, stat in stats.items():
        assert_same(seen[name], stat)


def _tables(cut: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: cut[name] for name in ("histogram", "scalars")}


def test_split_balances_bytes():
    layout = Layout(tuple((f"s{i}", 4096 if i % 4 < 3 else 14336) for i in range(128)))
    costs = [12 * c + 8 * 259 for _, c in layout.sites]
    loads = [sum(costs[a:b]) for a, b in layout.split(8)]
    assert max(loads) <= 1.1 * sum(costs) / 8


def test_misfits_are_named():
    stats = {"a": ActivationStats.empty(4), "b": ActivationStats.empty(4)}
    layout = Layout.of(stats)
    with pytest.raises(ValueError, match="one is b"):
        pack({"a": stats["a"]}, layout)
    with pytest.raises(ValueError, match="a: statistics of 4 channels"):
        pack(stats, layout, rank=0, ranks=2)
    tensors = pack(stats, layout)
    with pytest.raises(ValueError, match=r"absmax\.4: expected"):
        unpack({**tensors, "absmax.4": tensors["absmax.4"][:, :3]}, layout)
    with pytest.raises(ValueError, match=r"without sum_sq\.4"):
        unpack({k: v for k, v in tensors.items() if k != "sum_sq.4"}, layout)
    assert Layout((("a", 4),)).digest != Layout((("a", 5),)).digest


def test_sites_share_what_engines_fuse():
    names = ["m.q_proj", "m.k_proj", "m.v_proj", "m.o_proj", "m.gate_proj", "m.up_proj"]
    assert sites_of(names) == {
        "m.q_proj": ("m.q_proj", "m.k_proj", "m.v_proj"),
        "m.o_proj": ("m.o_proj",),
        "m.gate_proj": ("m.gate_proj", "m.up_proj"),
    }
    assert sites_of(["m.v_proj", "m.k_proj"]) == {"m.k_proj": ("m.k_proj", "m.v_proj")}
