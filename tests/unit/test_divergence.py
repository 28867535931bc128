"""Divergence estimators against closed forms, brute force and simulation."""

import math

import pytest
import torch

from forge_ptq.numerics.clusters import cluster_mean, t_quantile
from forge_ptq.numerics.divergence import compare, kl_from_logprobs, kl_per_token, rise


def test_kl_of_two_categoricals_matches_the_closed_form():
    ref = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    cand = torch.tensor([[0.25, 0.25, 0.5], [0.5, 0.25, 0.25]])
    expected = [0.5 * math.log(2) - 0.25 * math.log(2), math.log(2)]
    torch.testing.assert_close(kl_per_token(ref.log(), cand.log()), torch.tensor(expected))


def test_kl_matches_torch_and_ignores_constant_shifts():
    generator = torch.Generator().manual_seed(0)
    ref, cand = torch.randn(2, 40, 300, generator=generator) * 3
    expected = torch.nn.functional.kl_div(
        cand.log_softmax(-1), ref.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    torch.testing.assert_close(kl_per_token(ref, cand), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(kl_per_token(ref + 50, cand - 7), expected, rtol=1e-3, atol=1e-5)
    assert float(kl_per_token(ref, ref).max()) < 1e-6


def test_kl_of_bf16_logits_is_computed_in_fp32():
    ref = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    cand = (ref.float() + 0.01).bfloat16()
    assert kl_per_token(ref, cand).dtype == torch.float32
    torch.testing.assert_close(kl_per_token(ref, cand), kl_per_token(ref.float(), cand.float()))


def test_a_token_that_neither_gives_any_probability_contributes_nothing():
    ref = torch.tensor([[0.5, 0.5, 0.0]]).log()
    cand = torch.tensor([[0.25, 0.75, 0.0]]).log()
    expected = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    assert float(kl_from_logprobs(ref, cand)) == pytest.approx(expected)
    assert math.isinf(float(kl_from_logprobs(cand.roll(1), ref)))


def test_kl_shapes_must_agree():
    with pytest.raises(ValueError, match="shape"):
        kl_per_token(torch.zeros(2, 3), torch.zeros(2, 4))


def test_cluster_mean_with_equal_clusters_is_the_classic_standard_error():
    values = torch.randn(12, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    result = cluster_mean(list(values))
    means = values.mean(1)
    assert result.mean == pytest.approx(float(values.mean()))
    assert result.se == pytest.approx(float(means.std() / math.sqrt(12)))
    assert (result.clusters, result.tokens) == (12, 84)


def test_cluster_mean_with_unequal_clusters_matches_brute_force():
    generator = torch.Generator().manual_seed(3)
    clusters = [torch.randn(n, generator=generator) for n in (1, 4, 9, 2, 30)]
    flat = torch.cat(clusters).double()
    mean = float(flat.mean())
    squares = sum(float((c.double() - mean).sum()) ** 2 for c in clusters)
    result = cluster_mean([*clusters, torch.zeros(0)])
    assert result.mean == pytest.approx(mean)
    assert result.se == pytest.approx(math.sqrt(5 / 4 * squares) / flat.numel())


def test_interval_covers_the_truth_when_tokens_of_a_rollout_move_together():
    # The naive token-level error would be 5x too small here and cover about a third of the time.
    generator = torch.Generator().manual_seed(4)
    covered = 0
    for _ in range(400):
        shared_G1 = torch.randn(10, 1, generator=generator)
        values_GR = shared_G1 + 0.2 * torch.randn(10, 25, generator=generator)
        low, high = cluster_mean(list(values_GR)).interval(0.95)
        covered += low <= 0 <= high
    assert 0.92 < covered / 400 < 0.98


def test_rollouts_of_one_prompt_are_one_cluster():
    generator = torch.Generator().manual_seed(7)
    kl = [torch.rand(n, generator=generator) for n in (3, 5, 2, 7, 1, 4, 0)]
    together = [torch.cat([kl[0], kl[3]]), torch.cat([kl[1], kl[2], kl[5]]), kl[4]]
    zeros = [torch.zeros_like(kl_R) for kl_R in kl]
    result = compare(zeros, zeros, kl, clusters_G=["a", "b", "b", "a", "c", "b", "d"])
    expected = cluster_mean(together)
    assert result.log_rise.mean == pytest.approx(expected.mean)
    assert result.log_rise.se == pytest.approx(expected.se)
    assert result.log_rise.clusters == 3
    assert (result.sequences, result.tokens) == (6, 22)


@pytest.mark.parametrize(
    ("confidence", "degrees", "expected"),
    [  # published tables
        (0.95, 1, 12.7062),
        (0.95, 2, 4.30265),
        (0.95, 3, 3.18245),
        (0.95, 9, 2.26216),
        (0.95, 30, 2.04227),
        (0.99, 5, 4.03214),
        (0.999, 4, 8.61030),
        (0.90, 24, 1.71088),
        (0.80, 120, 1.28865),
    ],
)
def test_t_quantile_as_tabulated(confidence, degrees, expected):
    assert t_quantile(confidence, degrees) == pytest.approx(expected, rel=5e-6)


@pytest.mark.parametrize("degrees", [1, 2, 5, 8, 31, 127, 1000])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 1 - 0.05 / 3, 0.999])
def test_t_quantile_leaves_out_what_the_density_says(confidence, degrees):
    """Against the integral of the density, by Simpson's rule."""
    t, steps = t_quantile(confidence, degrees), 20_000
    x = torch.linspace(0, t, steps + 1, dtype=torch.float64)
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    scale = math.exp(log_scale) / math.sqrt(degrees * math.pi)
    density = scale * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    odd, even = float(density[1:-1:2].sum()), float(density[2:-1:2].sum())
    inside = 2 * t / steps / 3 * (float(density[0] + density[-1]) + 4 * odd + 2 * even)
    assert 1 - inside == pytest.approx(1 - confidence, rel=1e-4)


def test_t_quantile_edges():
    assert t_quantile(0.95, 0) == math.inf
    for confidence in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="between 0 and 1"):
            t_quantile(confidence, 5)


def test_without_skewness_the_interval_is_students():
    values = [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])]
    result = cluster_mean(values)
    half = t_quantile(0.9, 2) * result.se
    assert result.skewness == pytest.approx(0.0, abs=1e-12)
    assert result.interval(0.9) == pytest.approx((2.0 - half, 2.0 + half))
    assert cluster_mean([torch.ones(3)] * 4).interval(0.95) == (1.0, 1.0)


@pytest.mark.parametrize("seed", range(4))
def test_the_corrected_bounds_solve_halls_equation(seed):
    """T + g / sqrt(n) (T^2 / 3 + 1 / 6) + g^2 T^3 / (27 n) is t where a bound is the truth."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.rand(1 + g, generator=generator) ** 4 for g in range(12)]
    result, t = cluster_mean(values), t_quantile(0.95, 11)
    sums = torch.tensor([float(v.sum()) for v in values], dtype=torch.float64)
    counts = torch.arange(1, 13, dtype=torch.float64)
    residuals = sums - float(sums.sum() / counts.sum()) * counts
    g = float((residuals**3).mean() / (residuals**2).mean() ** 1.5)
    assert result.skewness == pytest.approx(g, rel=1e-5)
    for bound, expected in zip(result.interval(0.95), (t, -t), strict=True):
        big_t = (result.mean - bound) / result.se
        left = big_t + g / math.sqrt(12) * (big_t**2 / 3 + 1 / 6) + g**2 * big_t**3 / (27 * 12)
        assert left == pytest.approx(expected, rel=1e-4)


def test_the_upper_bound_of_skewed_values_holds_better_when_corrected():
    generator = torch.Generator().manual_seed(8)
    draws = (torch.randn(600, 48, 1, generator=generator) * 0.8).exp()
    truth, corrected, students = math.exp(0.8**2 / 2), 0, 0
    for values_GR in draws:
        result = cluster_mean(list(values_GR))
        corrected += result.interval(0.95)[1] < truth
        students += result.mean + t_quantile(0.95, 47) * result.se < truth
    assert students > 2 * 0.025 * 600
    assert corrected < 0.7 * students


def test_one_cluster_has_no_standard_error():
    result = cluster_mean([torch.ones(5)])
    assert result.se == math.inf
    assert result.interval(0.95) == (-math.inf, math.inf)


def test_compare_reports_both_estimates_and_the_worst_rollout():
    ref = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0]), torch.tensor([-0.5, -0.5, -0.5])]
    cand = [torch.tensor([-1.1, -2.1]), torch.tensor([-3.0]), torch.tensor([-0.5, -0.5, -0.2])]
    kl = [torch.tensor([0.01, 0.01]), torch.tensor([0.2]), torch.tensor([0.0, 0.0, 0.02])]
    result = compare(cand, ref, kl)
    assert result.estimator == "kl"
    assert result.kl == pytest.approx(0.24 / 6)
    assert result.perplexity_rise == pytest.approx(math.expm1(0.04))
    assert result.nll_rise == pytest.approx((0.2 - 0.3) / 6)
    assert result.nll_perplexity_rise == pytest.approx(math.expm1(-0.1 / 6))
    assert result.worst_sequence == 1
    assert result.worst_sequence_rise == pytest.approx(math.expm1(0.2))
    assert (result.tokens, result.sequences, result.non_finite) == (6, 3, 0)
    assert result.ci[0] < result.perplexity_rise < result.ci[1]


def test_without_kl_the_logprobs_decide_by_k3():
    ref, cand = [torch.tensor([-1.0]), torch.tensor([-1.0])], [torch.tensor([-1.2])] * 2
    result = compare(cand, ref)
    assert result.estimator == "k3, unweighted"
    assert result.kl is None
    assert result.token_kl is None
    k3 = math.exp(-0.2) - 1 + 0.2
    assert result.perplexity_rise == pytest.approx(math.expm1(k3), rel=1e-6)
    assert result.nll_perplexity_rise == pytest.approx(math.expm1(0.2), rel=1e-6)
    mu = [torch.tensor([-1.5]), None]
    result = compare(cand, ref, behaviour_GR=mu)
    assert result.estimator == "k3"
    assert result.log_rise.mean == pytest.approx((math.exp(0.5) + 1) / 2 * k3, rel=1e-6)
    far = compare(cand, ref, behaviour_GR=[torch.tensor([-20.0])] * 2)
    assert far.log_rise.mean == pytest.approx(10 * k3, rel=1e-6), "weights are capped"
    assert compare(cand, ref, behaviour_GR=[None, None]).estimator == "k3, unweighted"


def test_intervals_at_other_levels_are_nested():
    generator = torch.Generator().manual_seed(6)
    kl = [0.02 * torch.rand(9, generator=generator) for _ in range(12)]
    zeros = [torch.zeros(9)] * 12
    result = compare(zeros, zeros, kl, confidence=0.9)
    assert result.ci == result.interval(0.9)
    low, high = result.interval(0.99)
    assert low < result.ci[0] < result.perplexity_rise < result.ci[1] < high
    expected = cluster_mean(kl).interval(0.9)
    assert result.ci == pytest.approx([math.expm1(bound) for bound in expected])


@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 1000])
def test_token_kl_is_the_value_that_one_in_a_hundred_exceeds(count):
    kl = torch.randperm(count, generator=torch.Generator().manual_seed(count)).float()
    parts = list(kl.split(7))
    result = compare(
        [torch.zeros_like(p) for p in parts], [torch.zeros_like(p) for p in parts], parts
    )
    expected = sorted(kl.tolist())[max(0, math.ceil(0.99 * count) - 1)]
    assert result.token_kl == expected
    assert sum(value > expected for value in kl.tolist()) <= 0.01 * count


def test_kl_estimates_the_nll_rise_with_less_variance():
    # Tokens sampled from the reference: both means agree, the KL's error is far smaller.
    generator = torch.Generator().manual_seed(5)
    ref_RV = torch.randn(4000, 50, generator=generator) * 2
    cand_RV = ref_RV + 0.3 * torch.randn(4000, 50, generator=generator)
    tokens_R1 = torch.multinomial(ref_RV.softmax(-1), 1, generator=generator)
    ref_R = ref_RV.log_softmax(-1).gather(1, tokens_R1)[:, 0]
    cand_R = cand_RV.log_softmax(-1).gather(1, tokens_R1)[:, 0]
    split = [list(t.split(100)) for t in (cand_R, ref_R, kl_per_token(ref_RV, cand_RV))]
    result = compare(*split)
    assert result.kl is not None
    assert result.kl_se is not None
    assert abs(result.nll_rise - result.kl) < 3 * result.nll_rise_se
    assert result.kl_se < result.nll_rise_se / 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["candidate", "reference", "kl"])
def test_non_finite_scores_are_counted_and_spoil_the_estimate(bad, where):
    names = ("candidate", "reference", "kl", "behaviour")
    parts = {name: [torch.zeros(3), torch.zeros(2)] for name in names}
    parts[where][1][0] = bad
    result = compare(
        parts["candidate"], parts["reference"], parts["kl"], behaviour_GR=parts["behaviour"]
    )
    assert result.non_finite == 1
    assert math.isnan(result.perplexity_rise)
    assert all(math.isnan(bound) for bound in result.ci)


def test_negative_kl_counts_as_broken_unless_it_is_rounding():
    assert compare([torch.zeros(2)], [torch.zeros(2)], [torch.tensor([-0.1, 0.1])]).non_finite == 1
    assert compare([torch.zeros(2)], [torch.zeros(2)], [torch.tensor([-1e-6, 0.1])]).non_finite == 0


def test_pairs_must_match():
    with pytest.raises(ValueError, match="2 candidate rollouts but 1"):
        compare([torch.zeros(1)] * 2, [torch.zeros(1)])
    with pytest.raises(ValueError, match="rollout 0"):
        compare([torch.zeros(2)], [torch.zeros(3)])
    with pytest.raises(ValueError, match="behaviour logprobs"):
        compare([torch.zeros(2)], [torch.zeros(2)], behaviour_GR=[torch.zeros(3)])
    with pytest.raises(ValueError, match="rollout 0: a behaviour logprob is NaN"):
        compare([torch.zeros(1)], [torch.zeros(1)], behaviour_GR=[torch.tensor([math.nan])])
    with pytest.raises(ValueError, match="zip"):
        compare([torch.zeros(1)] * 2, [torch.zeros(1)] * 2, clusters_G=["one"])
    with pytest.raises(ValueError, match="no scored tokens"):
        compare([], [])


def test_rise_does_not_overflow():
    assert rise(1e6) == math.inf
    assert rise(0.0) == 0.0


@pytest.mark.parametrize("size", [1e-120, 1e170])
def test_errors_of_tiny_and_of_huge_values_neither_vanish_nor_overflow(size):
    values = [torch.tensor([x], dtype=torch.float64) for x in (0.0, 1.0, 1.0, 4.0)]
    expected, scaled = cluster_mean(values), cluster_mean([v * size for v in values])
    assert scaled.se == pytest.approx(expected.se * size)
    assert scaled.skewness == pytest.approx(expected.skewness)
    assert math.isinf(cluster_mean([*values, torch.tensor([math.inf])]).se)


def test_a_token_that_the_reference_all_but_excludes_is_an_infinite_rise():
    ref = [torch.tensor([-400.0]), torch.tensor([-1.0])]
    result = compare([torch.tensor([0.0]), torch.tensor([-1.0])], ref)
    assert result.perplexity_rise == math.inf
