"""The C++ pass against the torch version, bit for bit, and its sums against sums row by row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forge_ptq.numerics import observer_native as native
from forge_ptq.numerics.compiled import NotCompiledError, find_compiler, load
from forge_ptq.numerics.observer import ActivationObserver
from forge_ptq.numerics.stats import ActivationStats, measure
from tests.unit.test_stats import assert_same

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _a_kernel() -> None:
    """Where there is a compiler there has to be a kernel."""
    try:
        find_compiler()
    except NotCompiledError as error:
        pytest.skip(str(error))
    assert native.kernel() is not None


def observed(
    x_BTC: torch.Tensor,
    *,
    compiled: bool,
    mask_BT: torch.Tensor | None = None,
    shift_C: torch.Tensor | None = None,
    part: slice | None = None,
) -> ActivationStats:
    model = nn.Sequential(nn.Identity(), nn.Linear(x_BTC.shape[-1], 1, dtype=x_BTC.dtype))
    with ActivationObserver(
        model,
        ["1"],
        shift=None if shift_C is None else {"1": shift_C},
        channels=None if part is None else {"1": part},
        compiled=compiled,
    ) as observer:
        observer.mask_BT = mask_BT
        for hook in model[1]._forward_pre_hooks.values():
            hook(model[1], (x_BTC,))  # the product itself is not wanted
        return observer.take()["1"]


def assert_bit_equal(a: ActivationStats, b: ActivationStats) -> None:
    assert_same(a, b)
    assert torch.equal(a.absmax_C.view(torch.int32), b.absmax_C.view(torch.int32))


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Magnitudes over all octaves that fp16 has, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(
        torch.randint(-24, 13, shape, generator=generator).float()
    )
    x.view(-1)[::17], x.view(-1)[5::23] = 0.0, -0.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 512, 513, 576, 1536])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_like_torch(dtype, width, rows):
    x_BTC = sample(2, rows, width, dtype=dtype)
    mask_BT = torch.rand(2, rows, generator=torch.Generator().manual_seed(1)) < 0.6
    shift_C = (torch.arange(width) % 13 - 6).to(torch.int8)
    for mask in (None, mask_BT, torch.zeros_like(mask_BT)):
        for shift in (None, shift_C):
            ours = observed(x_BTC, compiled=True, mask_BT=mask, shift_C=shift)
            theirs = observed(x_BTC, compiled=False, mask_BT=mask, shift_C=shift)
            assert_bit_equal(ours, theirs)
            assert ours.tokens == 2 * rows if mask is None else ours.tokens == int(mask.sum())


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_does_none_of_it(dtype, monkeypatch):
    x_BTC = sample(2, 5, 9, dtype=dtype)
    monkeypatch.setattr(ActivationObserver, "_count", None)
    assert_same(observed(x_BTC, compiled=True), measure(x_BTC))
    with pytest.raises(TypeError, match="NoneType"):
        observed(x_BTC, compiled=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_are_read_where_they_lie(dtype):
    whole = sample(3, 11, 130, dtype=dtype)
    views = {
        "columns": whole[..., 5:42],
        "every other row": whole[:, ::2],
        "every third channel": whole[..., ::3],
        "transposed": whole[0].t()[None],
        "one row, repeated": whole[:1, :1].expand(2, 9, 130),
        "one channel, repeated": whole[..., :1].expand(3, 11, 64),
    }
    for x_BTC in views.values():
        mask_BT = torch.arange(x_BTC.shape[0] * x_BTC.shape[1]).view(x_BTC.shape[:2]) % 3 != 1
        for mask in (None, mask_BT):
            ours = observed(x_BTC, compiled=True, mask_BT=mask)
            theirs = observed(x_BTC.contiguous(), compiled=False, mask_BT=mask)
            assert_bit_equal(ours, theirs)
    shift_C = (torch.arange(130) % 5).to(torch.int8)
    for part in (slice(3, 97), slice(0, 130, 2)):
        ours = observed(whole, compiled=True, part=part, shift_C=shift_C)
        assert_bit_equal(ours, observed(whole, compiled=False, part=part, shift_C=shift_C))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("flush", [False, True])
def test_every_16_bit_number_is_widened_exactly(dtype, flush):
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    x_NC = patterns[torch.isfinite(patterns)][None]
    exact_C = x_NC[0].double()
    if flush and dtype == torch.bfloat16:
        exact_C = exact_C[exact_C.abs() >= 2.0**-126]  # bf16 has fp32's own denormals
        x_NC = exact_C.to(dtype)[None]
    scratch, total = (native.Sums(x_NC.shape[1], CPU) for _ in range(2))
    torch.set_flush_denormal(flush)
    try:
        assert native.observe(x_NC, None, None, scratch, total)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(total.absmax_C.double(), exact_C.abs())
    assert torch.equal(total.sum_C, exact_C)
    assert torch.equal(total.sum_sq_C, exact_C.square())
    for bad in patterns[~torch.isfinite(patterns)].view(torch.int16)[::97].view(dtype):
        x_NC = torch.tensor([[1.0, float(bad), 2.0]]).to(dtype)
        assert not native.observe(x_NC, None, None, native.Sums(3, CPU), native.Sums(3, CPU))


def test_sums_are_row_after_row_in_doubles():
    x_NC = sample(700, 75, seed=3)
    factor_C = torch.linspace(0.1, 3, 75)  # no power of two: products are rounded to fp32
    rows_N = torch.randperm(700, generator=torch.Generator().manual_seed(0))[:555]
    scratch, total = native.Sums(75, CPU), native.Sums(75, CPU)
    assert native.observe(x_NC, rows_N, factor_C, scratch, total)
    sum_C, sum_sq_C = torch.zeros(2, 75, dtype=torch.float64)
    for row_C in (x_NC[rows_N] * factor_C).double():
        sum_C += row_C
        sum_sq_C += row_C.square()
    assert torch.equal(total.sum_C, sum_C)
    assert torch.equal(total.sum_sq_C, sum_sq_C)


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_leaves_the_total_alone(bad, dtype):
    x_BTC = sample(2, 9, 70, dtype=dtype)
    x_BTC[1, 8, 69] = bad
    total = native.Sums(70, CPU)
    assert not native.observe(x_BTC.flatten(0, 1), None, None, native.Sums(70, CPU), total)
    assert not any(part.any() for part in (total.absmax_C, total.sum_C, total.codes))
    stats = observed(x_BTC, compiled=True)
    assert stats.non_finite == 1
    assert_bit_equal(stats, measure(x_BTC))
    masked_BT = torch.ones(2, 9, dtype=torch.bool)
    masked_BT[1, 8] = False
    stats = observed(x_BTC, compiled=True, mask_BT=masked_BT)
    assert stats.non_finite == 0
    assert_bit_equal(stats, measure(x_BTC[masked_BT]))


def test_the_ends_of_fp32():
    tiny, huge = 2.0**-149, torch.finfo(torch.float32).max
    x_BTC = torch.tensor([0.0, -0.0, tiny, -tiny, 2.0**-126, huge, -huge, 1.0]).view(1, 1, 8)
    x_BTC = x_BTC.repeat(1, 3, 1)
    ours = observed(x_BTC, compiled=True)
    assert_bit_equal(ours, measure(x_BTC))  # squares of huge overflow fp32, not a double
    assert ours.absmax_C[3] == tiny
    assert not torch.signbit(ours.absmax_C).any()
    shift_C = torch.tensor([0, 0, 1, 0, 1, 0, -1, 0], dtype=torch.int8)
    ours = observed(x_BTC, compiled=True, shift_C=shift_C)
    assert ours.non_finite == 3  # huge * 2
    assert_bit_equal(ours, observed(x_BTC, compiled=False, shift_C=shift_C))


def test_counters_are_emptied_in_time():
    row_C = sample(1, 4096, seed=4)
    x_NC = row_C.expand(2600, 4096)  # 10 million elements
    total = native.Sums(4096, CPU)
    assert native.observe(x_NC, None, None, native.Sums(4096, CPU), total)
    bits_C = row_C[0].abs().view(torch.int32) >> 20
    assert torch.equal(total.codes, bits_C.bincount(minlength=native.CODES) * 2600)


@pytest.mark.parametrize("width", [1, 64, 65, 576, 1000])
def test_threads_change_nothing(width, monkeypatch):
    x_NC = sample(50, width, dtype=torch.bfloat16)
    factor_C, rows_N = torch.full((width,), 0.5), torch.arange(0, 50, 3)
    alone, shared = native.Sums(width, CPU), native.Sums(width, CPU)
    assert native.observe(x_NC, rows_N, factor_C, native.Sums(width, CPU), alone)
    monkeypatch.setattr(native, "ELEMENTS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert native._cuts(50, 1000) == [0, 384, 768, 1000]
    assert native.observe(x_NC, rows_N, factor_C, native.Sums(width, CPU), shared)
    for name in ("absmax_C", "sum_C", "sum_sq_C", "codes"):
        assert torch.equal(getattr(alone, name), getattr(shared, name)), name
    x_NC[3, width - 1] = float("nan")
    assert not native.observe(x_NC, rows_N, factor_C, native.Sums(width, CPU), shared)
    assert torch.equal(alone.sum_C, shared.sum_C)


def test_what_does_not_fit_is_refused():
    x_NC, sums = torch.ones(4, 6), [native.Sums(6, CPU), native.Sums(6, CPU)]
    for rows_N in (torch.tensor([0, 4]), torch.tensor([-1, 0])):
        with pytest.raises(ValueError, match="between 0 and 3"):
            native.observe(x_NC, rows_N, None, *sums)
    with pytest.raises(ValueError, match="rows_N: expected int64"):
        native.observe(x_NC, torch.tensor([0], dtype=torch.int32), None, *sums)
    with pytest.raises(ValueError, match=r"factor_C: expected fp32 \[6\], got torch.float32 \[5\]"):
        native.observe(x_NC, None, torch.ones(5), *sums)
    with pytest.raises(ValueError, match="sums for 6 channels, x has 5"):
        native.observe(x_NC[:, :5], None, None, *sums)
    assert not native.takes(x_NC.double())
    assert_same(observed(x_NC.double()[None], compiled=True), measure(x_NC))


def test_a_kernel_that_is_wrong_is_not_used(tmp_path):
    text = native.SOURCE.read_text()
    for right, wrong in ("kMantissaShift = 20", "kMantissaShift = 21"), ("wide * wide", "wide"):
        assert text.count(right) == 1
        source = tmp_path / "observe.cpp"
        source.write_text(text.replace(right, wrong))
        with pytest.raises(NotCompiledError, match="wrong about"):
            native._check(native._functions(load(source, tmp_path / "cache")))
