"""Range choice from a histogram against brute force on the samples themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forge_ptq.numerics.names import RANGE_METHODS
from forge_ptq.numerics.ranges import choose_range, density, expected_error
from forge_ptq.numerics.stats import ActivationStats, measure


def draw(kind: str, count: int = 60_000) -> torch.Tensor:
    """Samples [count / 30, 30]; fp32, of very different shapes."""
    rng = np.random.default_rng(3)
    x = {
        "normal": lambda: rng.normal(size=count),
        "laplace": lambda: rng.laplace(size=count) * 0.01,
        "uniform": lambda: rng.uniform(-3, 3, size=count),
        "heavy": lambda: rng.standard_t(2.5, size=count),
        "relu": lambda: np.maximum(rng.normal(size=count), 0) * 20,
        "massive": lambda: np.concatenate([rng.normal(size=count - 30), np.full(30, 3000.0)]),
        "sparse": lambda: np.where(rng.random(count) < 1e-3, rng.normal(size=count), 0.0),
    }[kind]()
    return torch.from_numpy(x).float().view(-1, 30)


KINDS = ["normal", "laplace", "uniform", "heavy", "relu", "massive", "sparse"]


def quantization_error(x: np.ndarray, limit: float) -> float:
    """Mean squared error of the real quantizer on the real samples."""
    step = limit / 127
    codes = np.clip(np.rint(x / step), -127, 127)
    return float(np.mean((codes * step - x) ** 2))


@pytest.mark.parametrize("kind", KINDS)
def test_mse_is_as_good_as_a_search_on_the_samples(kind):
    x_TC = draw(kind)
    x = x_TC.double().numpy().ravel()
    chosen = choose_range(measure(x_TC), "mse")
    grid = np.abs(x).max() * 2.0 ** -np.arange(0, 12, 1 / 24)
    best = min(quantization_error(x, float(limit)) for limit in grid)
    assert quantization_error(x, chosen) <= 1.05 * best


@pytest.mark.parametrize("kind", KINDS)
def test_expected_error_is_the_real_one(kind):
    x_TC = draw(kind)
    stats = measure(x_TC)
    ranges_R = stats.absmax * torch.tensor([1.0, 0.7, 0.3, 0.05], dtype=torch.float64)
    expected = expected_error(*density(stats), ranges_R)
    x = x_TC.double().numpy().ravel()
    real = [quantization_error(x, limit) for limit in ranges_R.tolist()]
    # 30 equal outliers in a bin are no flat density; neither is a tail of ten samples.
    loose = {"massive": 0.2, "relu": 0.15}
    np.testing.assert_allclose(expected.numpy(), real, rtol=loose.get(kind, 0.06))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("percentile", [50.0, 99.0, 99.99, 100.0])
def test_percentile_is_within_a_bin(kind, percentile):
    x_TC = draw(kind)
    true = float(np.quantile(x_TC.abs().numpy(), percentile / 100))
    chosen = choose_range(measure(x_TC), "percentile", percentile=percentile)
    if true < 2**-16:  # lost among the zeros: nothing to clip
        assert chosen == measure(x_TC).absmax
    else:
        assert chosen == pytest.approx(true, rel=0.05)


def tensorrt_threshold(x: np.ndarray) -> float:
    """Migacz' loop over 2048 uniform bins and 128 levels, zeros left out."""
    x = np.abs(x[np.abs(x) >= 2**-16 * 1.125])
    counts, edges = np.histogram(x, bins=2048, range=(0, x.max()))
    best = (np.inf, 0.0)
    for end in range(128, 2049, 8):
        p = counts[:end].astype(float)
        inside = p.copy()
        p[-1] += counts[end:].sum()
        q = np.zeros(end)
        for chunk in np.array_split(np.arange(end), 128):
            used = inside[chunk] > 0
            q[chunk[used]] = inside[chunk].sum() / max(1, used.sum())
        if not inside.sum():
            continue
        p, q = p / p.sum(), np.maximum(q / q.sum(), 1e-9)
        seen = p > 0
        best = min(best, (float((p[seen] * np.log(p[seen] / q[seen])).sum()), edges[end]))
    return best[1]


@pytest.mark.parametrize("kind", ["normal", "laplace", "uniform", "heavy", "relu"])
def test_kl_is_near_the_classical_algorithm(kind):
    x_TC = draw(kind)
    chosen = choose_range(measure(x_TC), "kl")
    assert chosen == pytest.approx(tensorrt_threshold(x_TC.double().numpy()), rel=0.3)


def test_kl_clips_what_nearly_nobody_needs():
    stats = measure(draw("massive"))
    assert 2.5 < choose_range(stats, "kl") < 30
    assert choose_range(stats, "absmax") == 3000


@pytest.mark.parametrize("method", RANGE_METHODS)
def test_ranges_of_nothing_and_of_very_little(method):
    assert choose_range(ActivationStats.empty(4), method) == 0.0
    assert choose_range(measure(torch.zeros(3, 4)), method) == 0.0
    for value in (1e-30, 2.0**-16, 1.0, 1.125, 0.3, 65536.0, 1e9, 3e38):
        alone = measure(torch.tensor([[0.0, -value]]))
        limit = choose_range(alone, method)
        assert 0 < limit <= alone.absmax
        assert limit > 0.5 * value


@pytest.mark.parametrize("method", RANGE_METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_ranges_scale_with_the_data_and_do_not_exceed_it(method, kind):
    x_TC = draw(kind)
    limit = choose_range(measure(x_TC), method)
    assert 0 < limit <= float(x_TC.abs().max())
    if kind not in ("sparse", "relu", "massive"):
        assert choose_range(measure(x_TC * 8), method) == pytest.approx(8 * limit, rel=0.05)


@pytest.mark.parametrize("method", RANGE_METHODS)
def test_a_merged_absmax_below_the_largest_sample_bounds_the_range(method):
    parts = [measure(draw("normal")[:50] * scale) for scale in (1.0, 1.0, 20.0)]
    merged = parts[0] + parts[1] + parts[2]
    merged.absmax_C = parts[0].absmax_C  # as the rule median makes it
    assert 0 < choose_range(merged, method) <= merged.absmax


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="median"):
        choose_range(ActivationStats.empty(1), "median")
    for percentile in (0.0, 100.1):
        with pytest.raises(ValueError, match="percentile"):
            choose_range(measure(torch.ones(2, 2)), "percentile", percentile=percentile)
