"""Stochastic rounding to bf16 with fixed draws: against torchao's, and closed forms."""

import itertools
import math

import pytest
import torch
from torchao.optim import quant_utils

from forge_ptq.numerics import rounding
from forge_ptq.numerics.rounding import stochastic_bf16


def sample(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def neighbours(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(towards zero, away from zero) in bf16, as fp32."""
    bits = x.view(torch.int32) & ~0xFFFF
    return bits.view(torch.float32), (bits + 0x10000).view(torch.float32)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (33, 17), (3, 1, 5), (1, 4097), (257, 64)])
@pytest.mark.parametrize("scale", [1e-30, 0.02, 1.0, 1e30])
def test_every_value_becomes_a_neighbour(shape, scale):
    x = sample(*shape, scale=scale)
    below, above = neighbours(x)
    got = stochastic_bf16(x, "w")
    assert got.dtype == torch.bfloat16
    assert got.shape == x.shape
    assert bool(((got.float() == below) | (got.float() == above)).all())


def test_agrees_with_torchao_given_its_draws(monkeypatch):
    """torchao rounds up where its draw is less than the fraction, here where the sum carries."""
    x = sample(130, 70)
    draws = rounding._draws("w", (130, 70), (130, 70), (0, 0), x.device)
    monkeypatch.setattr(quant_utils.torch, "randint", lambda *a, **k: 0xFFFF - draws)
    assert torch.equal(stochastic_bf16(x, "w"), quant_utils._fp32_to_bf16_sr(x))


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.77])
def test_the_mean_is_kept(fraction):
    """1 + f ulp is rounded up with probability f: binomial, five standard deviations."""
    ulp, n = 2.0**-7, 200_000
    got = stochastic_bf16(torch.full((400, 500), 1 + fraction * ulp), "w").double()
    up = float((got > 1).double().mean())
    assert abs(up - fraction) < 5 * math.sqrt(fraction * (1 - fraction) / n)


def test_small_updates_survive_in_a_product():
    """An update of a hundredth of the spacing: lost by nearest, there on average."""
    start = sample(256, 512).bfloat16().float()
    step = start.abs() * 2.0**-8 * 0.01
    x = torch.ones(512)
    wanted = (start + step) @ x - start @ x
    nearest = (start + step).bfloat16().float() @ x - start @ x
    kept = stochastic_bf16(start + step, "w").float() @ x - start @ x
    assert float(nearest.abs().max()) == 0
    assert float(kept.mean()) == pytest.approx(float(wanted.mean()), rel=0.2)


def test_what_bf16_has_stays():
    x = sample(64, 64).bfloat16().float()
    x[3] = 0
    x[4, :4] = torch.tensor([0.0, -0.0, 2.0**-133, -(2.0**-126)])
    assert torch.equal(stochastic_bf16(x, "w").float(), x)


def test_a_growing_weight_is_rounded_up_once():
    start = torch.ones(1000)
    versions = torch.stack(
        [stochastic_bf16(start + k * 2.0**-7 / 50, "w").float() for k in range(51)]
    )
    assert bool((versions.diff(dim=0) >= 0).all())
    assert torch.equal(versions[0], start)
    assert torch.equal(versions[-1], start + 2.0**-7)


@pytest.mark.parametrize("cuts", [(0, 13, 13, 40), (0, 1, 39, 40)])
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_come_out_as_the_whole(cuts, axis):
    x = sample(40, 40)
    whole = stochastic_bf16(x, "w")
    for first, last in itertools.pairwise(cuts):
        rows = [slice(None)] * 2
        rows[axis] = slice(first, last)
        offset = [0, 0]
        offset[axis] = first
        part = stochastic_bf16(x[tuple(rows)], "w", whole=(40, 40), offset=offset)
        assert torch.equal(part, whole[tuple(rows)])


def test_chunks_come_out_as_the_whole(monkeypatch):
    x = sample(41, 29)
    whole = stochastic_bf16(x, "w")
    monkeypatch.setattr(rounding, "CHUNK", 100)
    assert torch.equal(stochastic_bf16(x, "w"), whole)


def test_draws_of_names_rows_and_columns_are_unrelated():
    draws = [
        rounding._draws(n, (256, 256), (256, 256), (0, 0), torch.device("cpu")) for n in ("a", "b")
    ]
    a, b = (d.double() / 65536 - 0.5 for d in draws)
    limit = 5 / 12 / math.sqrt(a.numel())  # variance 1/12 per value
    pairs = [(a, b), (a[1:], a[:-1]), (a[:, 1:], a[:, :-1]), (a, a.T.contiguous())]
    for one, other in pairs[:3]:
        assert abs(float((one * other).mean())) < limit
    off = ~torch.eye(256, dtype=torch.bool)
    assert abs(float((pairs[3][0] * pairs[3][1])[off].mean())) < 1.5 * limit
    counts = torch.histc(a, 64, -0.5, 0.5)
    chi2 = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
    assert chi2 < 63 + 5 * math.sqrt(2 * 63)


def test_what_is_not_finite_stays_so():
    bits = torch.tensor([0x7F800000, -0x800000, 0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000])
    x = bits.to(torch.int32).view(torch.float32).repeat(100, 1)
    got = stochastic_bf16(x, "w").float()
    assert torch.equal(got[:, :2], x[:, :2])
    assert bool(got[:, 2:].isnan().all())


def test_the_largest_number_may_overflow_but_keeps_its_sign():
    x = torch.full((100,), torch.finfo(torch.float32).max)
    got = stochastic_bf16(torch.stack([x, -x]), "w").float()
    assert bool((got[0] > 3.3e38).all())
    assert bool((got[1] < -3.3e38).all())


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_empty(shape):
    assert stochastic_bf16(torch.empty(shape), "w").shape == shape


def test_memory_is_not_shared_and_layout_does_not_matter():
    x = sample(30, 20)
    before = x.clone()
    assert torch.equal(stochastic_bf16(x.T.contiguous().T, "w"), stochastic_bf16(x, "w"))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_another_dtype_is_refused(dtype):
    with pytest.raises(TypeError, match=r"lm_head.*expected torch.float32"):
        stochastic_bf16(torch.ones(2, dtype=dtype), "lm_head")


@pytest.mark.parametrize(
    ("whole", "offset"), [((4, 4), (3, 0)), ((4, 4), (-1, 0)), ((4,), (0, 0)), ((4, 4), (0,))]
)
def test_a_part_outside_the_whole_is_refused(whole, offset):
    with pytest.raises(ValueError, match="is no part of"):
        stochastic_bf16(torch.ones(2, 4), "w", whole=whole, offset=offset)
