"""Stochastic rounding to bf16 with fixed draws: against torchao's, and closed forms."""

import math

import pytest
import torch
from torchao.optim import quant_utils

from forge_ptq.numerics import rounding
from forge_ptq.numerics.rounding import stochastic_bf16


def sample(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draws(name: str, shape: tuple[int, ...], whole: tuple[int, ...] | None = None) -> torch.Tensor:
    """Of the first positions of a tensor of the shape `whole`, from -1/2 to 1/2 in fp64."""
    positions = [torch.arange(size, dtype=torch.int32) for size in shape]
    found = rounding._draws(name, positions, whole or shape, torch.device("cpu"))
    return found.double() / 65536 - 0.5


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
    drawn = ((draws("w", (130, 70)) + 0.5) * 65536).int()
    monkeypatch.setattr(quant_utils.torch, "randint", lambda *a, **k: 0xFFFF - drawn)
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


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "part", [slice(0, 13), slice(13, 40), slice(5, 5), slice(3, 40, 4)], ids=str
)
def test_parts_come_out_as_the_whole(part, axis):
    x = sample(40, 40)
    where = [slice(None)] * 2
    where[axis] = part
    positions = [torch.arange(40, dtype=torch.int32)[along] for along in where]
    got = stochastic_bf16(x[tuple(where)], "w", whole=(40, 40), positions=positions)
    assert torch.equal(got, stochastic_bf16(x, "w")[tuple(where)])


def test_chunks_come_out_as_the_whole(monkeypatch):
    x = sample(41, 29)
    whole = stochastic_bf16(x, "w")
    monkeypatch.setattr(rounding, "CHUNK", 100)
    assert torch.equal(stochastic_bf16(x, "w"), whole)


@pytest.mark.parametrize("shape", [(1024, 1024), (1000, 1536), (1, 1 << 20), (65536, 16)], ids=str)
def test_draws_are_uniform_and_unrelated_at_any_distance(shape):
    """Chi squared over 64 bins, and the correlation with itself moved by any number of positions;
    over a million of them chance alone comes to five standard deviations."""
    x = draws("layers.0.mlp.up_proj.weight", shape).flatten()
    counts = torch.histc(x, 64, -0.5, 0.5)
    chi2 = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
    assert chi2 < 63 + 5 * math.sqrt(2 * 63)
    spectrum = torch.fft.rfft(x, n=2 * len(x)).abs().square()
    products = torch.fft.irfft(spectrum)[1 : len(x) // 2]
    pairs = len(x) - torch.arange(1, len(x) // 2).double()
    assert float((products * 12 / pairs.sqrt()).abs().max()) < 6.5


@pytest.mark.parametrize("distance", [1, 48, 4096, 12288, 393216])
def test_near_draws_are_as_frequent_as_far_ones_at_a_distance(distance):
    x = draws("w", (1 << 21,))
    apart = (x[distance:] - x[:-distance]).remainder(1)
    near = float(((apart < 1 / 64) | (apart > 63 / 64)).double().mean())
    assert near == pytest.approx(1 / 32, rel=0.02)


def test_draws_of_two_names_are_unrelated():
    """Large powers of two: the name must not be multiplied away. Nor may one tensor have the draws
    of another at other positions."""
    names = [f"model.layers.{i}.{part}.weight" for i in range(12) for part in ("q", "o")]
    whole = (4096, 4096)
    rows = torch.stack([draws(name, (64, 4096), whole).flatten() for name in names])
    correlation = 12 * rows @ rows.T / rows.shape[1] - torch.eye(len(names))
    assert float(correlation.abs().max()) < 5.5 / math.sqrt(rows.shape[1])
    spectra = torch.fft.rfft(rows, n=2 * rows.shape[1])
    for one in range(len(names) - 1):
        crossed = torch.fft.irfft(spectra[one].conj() * spectra[one + 1 :])
        assert float(crossed.abs().max()) * 12 / math.sqrt(rows.shape[1]) < 7


def test_first_weights_of_tensors_have_draws_of_their_own():
    names = [f"layers.{i}.weight" for i in range(1000)]
    first = torch.cat([draws(name, (1,)) for name in names])
    assert len(set(first.tolist())) > 950
    assert abs(float(first.mean())) < 5 / math.sqrt(12 * len(first))


def test_the_hash_is_one_to_one():
    """A fold that repeats the sign would give x and ~x the same draw."""
    x = torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(0))
    shifted = rounding._shifted(x.to(torch.int32), 13)
    assert torch.equal(shifted.long(), (x % 2**32) >> 13)


def test_neighbours_of_two_names_do_not_run_in_parallel():
    """With one factor for all names a tensor would have another's draws, moved."""
    steps = set()
    for name in ("a", "b", "c"):
        found = draws(name, (1 << 16,))
        assert torch.unique(found).numel() > 40_000
        steps.add(tuple(found.diff()[:8].tolist()))
    assert len(steps) == 3
    moved = [int(rounding._factor_and_addend(name)[0]) for name in ("a", "b", "c")]
    assert len(set(moved)) == 3
    assert all(factor % 2 for factor in moved)


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


def test_layout_does_not_matter_and_the_tensor_is_not_changed():
    x = sample(30, 20)
    before = x.clone()
    assert torch.equal(stochastic_bf16(x.T.contiguous().T, "w"), stochastic_bf16(x, "w"))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_another_dtype_is_refused(dtype):
    with pytest.raises(TypeError, match=r"lm_head.*expected torch.float32"):
        stochastic_bf16(torch.ones(2, dtype=dtype), "lm_head")


@pytest.mark.parametrize(
    ("whole", "sizes"), [((4, 4), (3, 4)), ((4, 4), (2, 5)), ((4,), (2, 4)), ((4, 4), (2,))]
)
def test_positions_that_do_not_match_are_refused(whole, sizes):
    positions = [torch.arange(size, dtype=torch.int32) for size in sizes]
    with pytest.raises(ValueError, match=r"w: positions for .* expected \(2, 4\) of them"):
        stochastic_bf16(torch.ones(2, 4), "w", whole=whole, positions=positions)
