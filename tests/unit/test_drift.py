"""Drift numbers against the samples, closed forms and SciPy-free definitions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from forge_ptq.numerics.drift import (
    Drift,
    Thresholds,
    clipped_fraction,
    drift,
    exceeded,
    js_distance,
    largest,
    worst,
)
from forge_ptq.numerics.merge import RULES, reduce
from forge_ptq.numerics.stats import ActivationStats, measure


def sample(seed: int, scale: float = 1.0, tokens: int = 2000) -> torch.Tensor:
    return torch.randn(tokens, 33, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("limit", [0.05, 0.5, 1.3, 2.9, 3.7])
def test_clipped_fraction_is_near_the_true_share(limit):
    x_TC = sample(0)
    true = float((x_TC.abs() > limit).double().mean())
    assert clipped_fraction(measure(x_TC), limit) == pytest.approx(true, rel=0.1, abs=2e-5)


def test_clipped_fraction_at_its_ends():
    x_TC = sample(0)
    stats = measure(x_TC)
    assert clipped_fraction(stats, stats.absmax) == 0.0
    assert clipped_fraction(stats, 1e9) == 0.0
    assert clipped_fraction(stats, 0.0) == 0.0
    assert clipped_fraction(stats, 1e-9) > 0.99
    assert clipped_fraction(ActivationStats.empty(3), 1.0) == 0.0
    two = measure(torch.tensor([[0.5, 3e5]]))  # beyond the last edge
    assert clipped_fraction(two, 1.0) == 0.5
    # A maximum on a bin's very edge leaves that bin no width.
    assert clipped_fraction(measure(torch.tensor([[0.1, 1.0]])), 0.5) == 0.5


def test_js_distance_is_a_bounded_metric():
    a, b = torch.tensor([4, 0, 0]), torch.tensor([0, 0, 9])
    assert js_distance(a, a * 7) == 0.0
    assert js_distance(a, b) == 1.0
    p, q = torch.tensor([1, 3]), torch.tensor([3, 1])
    kl = 0.25 * math.log2(0.5) + 0.75 * math.log2(1.5)  # of p and of q to their middle
    assert js_distance(p, q) == pytest.approx(math.sqrt(kl))
    assert js_distance(p, q) == js_distance(q, p)
    assert js_distance(p, torch.zeros(2, dtype=torch.int64)) == 0.0


def test_same_distribution_does_not_drift_and_another_does():
    base = measure(sample(0))
    same, wider, narrower = (measure(sample(1, scale)) for scale in (1.0, 3.0, 0.3))
    quiet = drift(same, base, base.absmax)
    assert quiet.js_distance < 0.03
    assert quiet.clipped_fraction < 1e-4
    assert quiet.absmax_ratio == same.absmax / base.absmax
    loud = drift(wider, base, base.absmax)
    assert loud.js_distance > 0.3
    assert loud.clipped_fraction > 0.05
    assert loud.absmax_ratio > 2
    assert drift(narrower, base, base.absmax).js_distance > 0.3


@pytest.mark.parametrize("rule", RULES)
def test_what_was_merged_by_any_rule_has_not_drifted_from_itself(rule):
    """One share of five saw outliers that its rule may have lowered the range below."""
    parts = [sample(seed, 50.0 if seed == 4 else 1.0) for seed in range(5)]
    base = reduce({f"s{i}": {"a": measure(x_TC)} for i, x_TC in enumerate(parts)}, rule)["a"]
    now = measure(torch.cat(parts))
    found = drift(now, base, base.absmax)
    assert found.js_distance == 0.0
    assert 0.85 < found.absmax_ratio <= 1.0  # a bin's width
    meant = clipped_fraction(base, base.absmax)
    # What the range cut off is known, so that what is clipped beyond it is nothing.
    assert found.clipped_fraction == pytest.approx(meant, rel=0.1)
    true = float((torch.cat(parts).abs() > base.absmax).double().mean())
    assert meant == pytest.approx(true, rel=0.1)
    assert drift(measure(parts[4] * 3), base, base.absmax).absmax_ratio > 2


def test_the_largest_is_bounded_by_the_histogram_if_absmax_was_lowered():
    stats = measure(torch.tensor([[0.3, 5.1]]))
    assert largest(stats) == stats.absmax
    lowered = replace(stats, absmax_C=torch.full((2,), 0.3))
    assert largest(lowered) == 5.5  # of eighths of an octave from 4
    beyond = replace(measure(torch.tensor([[1e9]])), absmax_C=torch.ones(1))
    assert largest(beyond) > 1e38
    assert clipped_fraction(beyond, 1.0) == 1.0
    assert largest(ActivationStats.empty(3)) == 0.0
    assert largest(measure(torch.zeros(4, 3))) == 0.0


def test_sites_that_saw_nothing_have_not_drifted():
    base, empty = measure(sample(0, tokens=5)), ActivationStats.empty(33)
    zeros = measure(torch.zeros(4, 33))
    assert drift(empty, base, 1.0) == drift(base, empty, 1.0) == Drift()
    assert drift(zeros, zeros, 0.0).absmax_ratio == 1.0
    assert drift(base, zeros, 0.0).absmax_ratio == math.inf


def test_worst_and_exceeded_name_the_site():
    drifts = {"a": Drift(0.001, 0.1, 1.5), "b": Drift(0.0, 0.3, 1.0)}
    assert worst(drifts) == Drift(0.001, 0.3, 1.5)
    assert worst({}) == Drift()
    assert exceeded(drifts, Thresholds(0.01, 0.5, 2.0)) is None
    assert exceeded(drifts, Thresholds(0.01, 0.2, 2.0)) == "b: js_distance 0.3 exceeds 0.2"
    reason = exceeded(drifts, Thresholds(0.0, 0.2, 1.4))
    assert reason == "a: clipped_fraction 0.001 exceeds 0"
