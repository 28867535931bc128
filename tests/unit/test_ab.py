"""The A/B test against closed forms and an integral that shares no code with it."""

from __future__ import annotations

import json
import math
import random
import statistics

import numpy as np
import pytest

from forge_ptq.config.guard import ABConfig
from forge_ptq.services import ab
from forge_ptq.services.ab import ABTest, Moments, incomplete_beta, student_cdf

SIZES = [32, 64, 128, 256]
"""Prompts of the smaller arm at the looks of a block, with min_prompts = 32."""


def welch_less(sample: list[float], other: list[float]) -> float | None:
    return ab.welch_less(Moments.of(sample), Moments.of(other))


def integral_cdf(t: float, df: float) -> float:
    """P(T <= t) by Simpson's rule over the density with t = tan(u): no tail is cut off."""
    log_c = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - math.log(df * math.pi) / 2

    def f(u: float) -> float:
        cos = math.cos(u)
        if cos <= 1e-12:
            return 0.0
        x = math.tan(u)
        return math.exp(log_c - (df + 1) / 2 * math.log1p(x * x / df)) / cos**2

    low, high, n = -math.pi / 2, math.atan(t), 20_000
    h = (high - low) / n
    odd = math.fsum(f(low + i * h) for i in range(1, n, 2))
    even = math.fsum(f(low + i * h) for i in range(2, n, 2))
    return (f(low) + f(high) + 4 * odd + 2 * even) * h / 3


@pytest.mark.parametrize("t", [-40.0, -3.0, -1.0, -1e-3, 0.0, 0.2, 2.0, 12.0])
def test_student_cdf_has_its_closed_forms(t: float) -> None:
    """One degree of freedom is Cauchy's; two and four have algebraic forms."""
    assert student_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-13)
    assert student_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-13)
    s = t / math.sqrt(4 + t * t)
    assert student_cdf(t, 4) == pytest.approx(0.5 + 0.75 * (s - s**3 / 3), abs=1e-13)


@pytest.mark.parametrize("df", [2.3, 5.0, 17.7, 61.2, 200.5])
@pytest.mark.parametrize("t", [-6.0, -1.7, -0.1, 0.4, 2.5])
def test_student_cdf_is_the_integral_of_its_density(t: float, df: float) -> None:
    assert student_cdf(t, df) == pytest.approx(integral_cdf(t, df), rel=1e-7, abs=1e-10)


def test_student_cdf_tends_to_the_normal() -> None:
    for t in (-3.0, -1.0, 0.5):
        assert student_cdf(t, 1e7) == pytest.approx(statistics.NormalDist().cdf(t), abs=1e-6)


def test_small_tails_keep_their_digits() -> None:
    """In the far tail of the Cauchy, P = 1 / (pi |t|) to first order; no cancellation to zero."""
    assert student_cdf(-1e8, 1) == pytest.approx(1 / (math.pi * 1e8), rel=1e-6)


@pytest.mark.parametrize("x", [0.0, 0.01, 0.3, 0.5, 0.9, 0.999, 1.0])
def test_incomplete_beta_closed_forms(x: float) -> None:
    """I_x(a, 1) = x^a and I_x(1, b) = 1 - (1 - x)^b."""
    for a in (0.5, 1.0, 7.25, 40.0):
        assert incomplete_beta(a, 1.0, x) == pytest.approx(x**a, abs=1e-13)
        assert incomplete_beta(1.0, a, x) == pytest.approx(1 - (1 - x) ** a, abs=1e-13)


def test_welch_of_two_pairs_by_hand() -> None:
    """{0, 2} against {3, 5}: t = -3 / sqrt(2), df = 2, p = 1/2 - 3 / (2 sqrt(13))."""
    assert welch_less([0.0, 2.0], [3.0, 5.0]) == pytest.approx(0.5 - 3 / (2 * math.sqrt(13)))


def test_welch_with_unequal_spread_by_hand() -> None:
    """n = 3 and 2: shares 4/3 and 1/2 of the squared error, df = (11/6)^2 / (8/9 + 1/4)."""
    a, b = [1.0, 3.0, 5.0], [4.0, 5.0]
    square = 4 / 3 + 0.25
    df = square**2 / ((4 / 3) ** 2 / 2 + 0.25**2 / 1)
    expected = integral_cdf((3.0 - 4.5) / math.sqrt(square), df)
    assert welch_less(a, b) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("a", "b", "p"),
    [([1, 1], [1, 1], 0.5), ([0, 0], [1, 1], 0.0), ([1, 1], [0, 0], 1.0), ([1], [0, 1], None)],
)
def test_samples_without_spread_or_size(a: list[float], b: list[float], p: float | None) -> None:
    assert welch_less(a, b) == p


def test_p_is_uniform_when_nothing_differs() -> None:
    """Of 2,000 tests on equal arms 5 % are significant at 5 %, within four standard errors."""
    draw = random.Random(0)
    hits = 0
    for _ in range(2000):
        live = [float(draw.random() < 0.6) for _ in range(40)]
        full = [float(draw.random() < 0.6) for _ in range(60)]
        hits += (welch_less(live, full) or 0.0) < 0.05
    assert abs(hits / 2000 - 0.05) < 4 * math.sqrt(0.05 * 0.95 / 2000)


def fed(live: list[float], full: list[float], **cfg: float) -> ABTest:
    test = ABTest(ABConfig(**cfg))  # type: ignore[arg-type]
    for reward in live:
        test.add("live", [reward])
    for reward in full:
        test.add("companion", [reward])
    return test


def test_moments_are_those_of_the_values() -> None:
    rng = np.random.default_rng(0)
    for values in (rng.normal(1e6, 1e-3, 301), np.full(77, 0.1), rng.random(2)):
        moments = Moments.of(values.tolist())
        assert moments.mean == pytest.approx(float(values.mean()), rel=1e-13)
        error = float(values.var(ddof=1)) / len(values)
        assert moments.error == pytest.approx(error, rel=1e-6, abs=1e-30)


def test_a_clear_loss_fails_and_says_how_much() -> None:
    report = fed([0.6, 0.4] * 20, [1.0, 0.8] * 20).verdict()
    assert report.failed
    assert report.agreement == pytest.approx(0.5 / 0.9)
    assert report.difference == pytest.approx(-0.4)
    assert report.p_value is not None
    assert report.limit is not None
    assert report.p_value < 1e-10 < report.limit
    assert (report.prompts_live, report.prompts_companion) == (40, 40)


@pytest.mark.parametrize(
    ("live", "full", "why"),
    [
        ([0.6, 0.4] * 15, [1.0, 0.8] * 20, "30 prompts are under min_prompts = 32"),
        ([0.96, 0.97] * 20, [1.0, 0.99] * 20, "certain, but within 5 %"),
        ([1.0, 0.0] * 20, [1.0, 0.0] * 19 + [1.0] * 6, "worse, but may be chance"),
        ([1.0, 0.8] * 20, [0.6, 0.4] * 20, "better"),
        ([], [1.0] * 40, "one arm only"),
    ],
)
def test_what_does_not_fail(live: list[float], full: list[float], why: str) -> None:
    assert not fed(live, full).verdict().failed, why


def test_the_prompt_is_the_unit() -> None:
    """Thirty-two samples of one prompt each are one prompt an arm: no significance from them."""
    test = ABTest(ABConfig(min_prompts=1))
    test.add("live", [0.0] * 31 + [33.0])
    test.add("companion", [1.0] * 32)
    report = test.verdict()
    assert (report.prompts_live, report.prompts_companion) == (1, 1)
    assert report.p_value is None
    assert not report.failed
    assert report.difference == pytest.approx(33 / 32 - 1)


def test_it_looks_when_the_smaller_arm_has_doubled_and_then_starts_anew() -> None:
    test = ABTest(ABConfig())
    looks, limits = [], []
    for number in range(1, 2 * SIZES[-1] + 1):
        test.add("live", [1.0])
        for _ in range(3):
            test.add("companion", [1.0])
        report = test.verdict()
        if report.limit is not None:
            looks.append(number)
            limits.append(report.limit)
            assert report.prompts_companion == 3 * report.prompts_live
    assert looks == SIZES + [SIZES[-1] + size for size in SIZES]
    assert sum(limits[:4]) == pytest.approx(0.05 / ab.BLOCKS)
    assert limits[:4] == limits[4:]
    assert limits[:4] == sorted(limits[:4])
    assert test.verdict().prompts_live == test.verdict().prompts_companion == 0


def test_looks_that_are_skipped_leave_their_error_to_the_next() -> None:
    assert fed([1.0] * 300, [1.0] * 300).verdict().limit == pytest.approx(0.05 / ab.BLOCKS)
    test = fed([1.0] * 70, [1.0] * 90)
    assert test.verdict().limit == pytest.approx(0.05 / ab.BLOCKS * 3 / 15)
    assert test.verdict().limit is None, "nothing new"


def test_between_looks_nothing_fails() -> None:
    test = fed([1.0] * 32, [1.0] * 32)
    assert not test.verdict().failed
    for _ in range(31):
        test.add("live", [0.0])
        test.add("companion", [1.0])
        report = test.verdict()
        assert not report.failed
    assert report.p_value is not None
    assert report.p_value < 1e-9, "it would have"
    test.add("live", [0.0])
    test.add("companion", [1.0])
    assert test.verdict().failed


STEPS, PER_STEP, MIN_PROMPTS = 256, 4, 16
"""A run of BLOCKS blocks, PER_STEP prompts per arm and training step."""


def rewards(runs: int, seed: int) -> np.ndarray:
    """Of both arms in every step of every run, all healthy: [runs, STEPS, 2, PER_STEP] float64.

    The means of 8 samples that are right or wrong, of prompts that differ in difficulty.
    """
    rng = np.random.default_rng(seed)
    difficulty = rng.beta(1.2, 0.8, (runs, STEPS, 2, PER_STEP))
    return rng.binomial(8, difficulty) / 8


def found(run: np.ndarray) -> int | None:
    """The step in which a run is taken back."""
    test = ABTest(ABConfig(min_prompts=MIN_PROMPTS))
    for step, (live, full) in enumerate(run.tolist()):
        for reward in live:
            test.add("live", [reward])
        for reward in full:
            test.add("companion", [reward])
        if test.verdict().failed:
            return step
    return None


def test_over_a_whole_run_no_more_healthy_plans_fail_than_significance_says() -> None:
    """Of 500 runs of 256 steps at most 5 % are taken back, looked at after every one of them; a
    test that peeks as often at all the data takes back four times as many."""
    assert ab.BLOCKS * ab.LOOKS[-1] * MIN_PROMPTS == STEPS * PER_STEP
    runs = rewards(500, seed=1)
    false = sum(found(run) is not None for run in runs)
    assert 0 < false <= 0.05 * len(runs)
    n = np.arange(1, STEPS + 1) * PER_STEP
    total, squares = runs.sum(-1).cumsum(1), (runs**2).sum(-1).cumsum(1)
    mean = total / n[:, None]
    error = (squares / n[:, None] - mean**2) / (n[:, None] - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = (mean[..., 0] - mean[..., 1]) / np.sqrt(error.sum(-1))
    peeking = (t < -1.645) & (mean[..., 0] < 0.95 * mean[..., 1]) & (n >= MIN_PROMPTS)
    assert peeking.any(1).mean() > 0.2


@pytest.mark.parametrize("onset", [0, 100])
def test_a_late_loss_is_found_as_fast_as_an_early_one(onset: int) -> None:
    """A loss of 30 %: in nine of ten runs within two blocks, 64 steps, of its beginning, the 100
    good steps before it notwithstanding."""
    runs = rewards(60, seed=2)[:, : onset + 64]
    runs[:, onset:, 0] *= 0.7
    steps = [found(run) for run in runs]
    assert sum(step is not None and step >= onset for step in steps) >= 54


def test_memory_is_bounded() -> None:
    test = ABTest(ABConfig())
    before = len(json.dumps(test.state()))
    for number in range(5000):
        test.add("live", [number % 7 / 7])  # no companion is ever drawn
        test.verdict()
    assert len(json.dumps(test.state())) < before + 60


def test_agreement_of_rewards_that_are_not_positive() -> None:
    assert fed([-1.1] * 2, [-1.0] * 2).verdict().agreement == pytest.approx(0.9)
    assert fed([0.0] * 2, [0.0] * 2).verdict().agreement == 1.0
    assert fed([-0.5] * 2, [0.0] * 2).verdict().agreement == -math.inf


def test_state_survives_json() -> None:
    test = fed([0.5, 0.25] * 20, [1.0, 0.75] * 20)
    assert test.verdict().limit is not None
    other = ABTest(test.cfg)
    other.restore(json.loads(json.dumps(test.state())))
    report = other.verdict()
    assert report == test.verdict()
    assert report.limit is None, "a look is not taken twice"
    other.add("live", [0.0])
    assert other.verdict() != test.verdict()


def test_wrong_rewards_and_arms_are_refused() -> None:
    test = ABTest(ABConfig())
    with pytest.raises(ValueError, match="arm is 'left'"):
        test.add("left", [1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nan"):
        test.add("live", [1.0, math.nan])
    with pytest.raises(ValueError, match=r"\[\]"):
        test.add("live", [])
