"""Merging shares: equal to one pass, blind to order, deaf to whoever is off."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from forge_ptq.numerics.merge import RULES, Judgement, judge, reduce, worst
from forge_ptq.numerics.stats import ActivationStats, measure
from tests.unit.test_stats import assert_same

WIDTHS = {"a.q_proj": 37, "a.down_proj": 5}


def rollouts(shares: int = 4, tokens: int = 23, seed: int = 0) -> dict[str, dict]:
    """{share: {site: x_TC}} of slightly different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"s{i}": {n: torch.randn(tokens + i, c, generator=generator) for n, c in WIDTHS.items()}
        for i in range(shares)
    }


def measured(data: dict[str, dict]) -> dict[str, dict[str, ActivationStats]]:
    return {share: {n: measure(x) for n, x in sites.items()} for share, sites in data.items()}


@dataclass(frozen=True)
class Merged:
    stats: dict[str, ActivationStats]
    contributors: tuple[str, ...]
    left_out: dict[str, str]


def merge_shares(shares: dict[str, dict], rule: str, sigma_clip: float) -> Merged:
    """Both steps over all sites, as a merger of one rank takes them."""
    reasons = {share: j.reason(sigma_clip) for share, j in judge(shares).items()}
    left_out = {share: reason for share, reason in reasons.items() if reason is not None}
    kept = {share: stats for share, stats in shares.items() if share not in left_out}
    return Merged(reduce(kept, rule) if kept else {}, tuple(sorted(kept)), left_out)


@pytest.mark.parametrize("rule", ["histogram", "max"])
@pytest.mark.parametrize("sigma_clip", [0.0, 25.0])
def test_equals_a_single_pass(rule, sigma_clip):
    data = rollouts()
    merged = merge_shares(measured(data), rule, sigma_clip)
    assert merged.contributors == ("s0", "s1", "s2", "s3")
    assert not merged.left_out
    for site in WIDTHS:
        assert_same(merged.stats[site], measure(torch.cat([data[s][site] for s in data])))


@pytest.mark.parametrize("rule", RULES)
def test_order_does_not_matter_to_the_last_bit(rule):
    shares = measured(rollouts())
    first = merge_shares(shares, rule, 25.0)
    for order in itertools.permutations(shares):
        other = merge_shares({share: shares[share] for share in order}, rule, 25.0)
        assert other.contributors == first.contributors
        for site in WIDTHS:
            a, b = first.stats[site], other.stats[site]
            assert torch.equal(a.sum_sq_C, b.sum_sq_C)
            assert torch.equal(a.absmax_C, b.absmax_C)
            assert (a.sum, a.tokens) == (b.sum, b.tokens)


def test_the_rules_against_numbers_by_hand():
    shares = {}
    for index, (value, tokens) in enumerate([(1.0, 1), (2.0, 2), (9.0, 1), (4.0, 4)]):
        x_TC = torch.full((tokens, 2), value)
        x_TC[:, 1] = -value / 2
        shares[f"s{index}"] = {"a": measure(x_TC)}
    for rule, expected in {
        "histogram": 9.0,
        "max": 9.0,
        "weighted_mean": (1 + 2 * 2 + 9 + 4 * 4) / 8,
        "median": 3.0,
    }.items():
        stats = reduce(shares, rule)["a"]
        assert stats.absmax_C.tolist() == [expected, expected / 2], rule
        assert stats.tokens == 8
        assert stats.count == 16
    three = {share: shares[share] for share in ("s0", "s1", "s2")}
    assert reduce(three, "median")["a"].absmax == 2.0


@pytest.mark.parametrize("rule", RULES)
def test_a_share_of_no_rollouts_changes_nothing(rule):
    shares = measured(rollouts())
    with_idle = {**shares, "idle": {n: ActivationStats.empty(c) for n, c in WIDTHS.items()}}
    plain, merged = merge_shares(shares, rule, 3.0), merge_shares(with_idle, rule, 3.0)
    assert merged.left_out == {}
    assert "idle" in merged.contributors
    for site in WIDTHS:
        assert_same(merged.stats[site], plain.stats[site])


def test_non_finite_shares_are_left_out_and_named():
    data = rollouts()
    data["s2"]["a.down_proj"][3, 1] = float("nan")
    for sigma_clip in (0.0, 25.0):
        merged = merge_shares(measured(data), "histogram", sigma_clip)
        assert merged.left_out == {"s2": "1 non-finite activations, first in a.down_proj"}
        rest = [data[s]["a.q_proj"] for s in ("s0", "s1", "s3")]
        assert_same(merged.stats["a.q_proj"], measure(torch.cat(rest)))


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_a_share_that_is_off_is_left_out(factor):
    data = rollouts(shares=5)
    data["s1"]["a.q_proj"] *= factor
    merged = merge_shares(measured(data), "histogram", 25.0)
    assert set(merged.left_out) == {"s1"}
    assert "a.q_proj" in merged.left_out["s1"]
    assert not merge_shares(measured(data), "histogram", 0.0).left_out


def test_identical_shares_condemn_nobody_over_nothing():
    x_TC = torch.randn(50, 37, generator=torch.Generator().manual_seed(0))
    shares = {f"s{i}": {"a": measure(x_TC * (1.5 if i == 0 else 1.0))} for i in range(6)}
    assert not merge_shares(shares, "max", 25.0).left_out
    shares["s0"] = {"a": measure(x_TC * 100)}
    assert set(merge_shares(shares, "max", 25.0).left_out) == {"s0"}


def test_two_shares_cannot_outvote_each_other():
    data = rollouts(shares=2)
    data["s1"]["a.q_proj"] *= 1e4
    assert not merge_shares(measured(data), "histogram", 3.0).left_out


def test_slices_judge_and_reduce_like_the_whole():
    data = rollouts(shares=5)
    data["s1"]["a.q_proj"] *= 1e3
    data["s3"]["a.down_proj"][0, 0] = float("inf")
    shares = measured(data)
    slices = [{s: {n: shares[s][n]} for s in shares} for n in WIDTHS]
    parts = [judge(piece) for piece in slices]
    combined = {share: worst(part[share] for part in parts) for share in shares}
    whole = merge_shares(shares, "histogram", 25.0)
    assert combined == judge(shares)
    reasons = {share: j.reason(25.0) for share, j in combined.items()}
    assert {s for s, r in reasons.items() if r} == set(whole.left_out) == {"s1", "s3"}
    for piece, site in zip(slices, WIDTHS, strict=True):
        kept = {share: piece[share] for share in piece if not reasons[share]}
        assert_same(reduce(kept)[site], whole.stats[site])


def test_nobody_left():
    bad = {"s0": {"a": measure(torch.full((1, 2), float("nan")))}}
    merged = merge_shares(bad, "histogram", 25.0)
    assert (merged.stats, merged.contributors, set(merged.left_out)) == ({}, (), {"s0"})


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="mean"):
        reduce(measured(rollouts()), "mean")
    with pytest.raises(ValueError, match="no share"):
        reduce({})
    shares = measured(rollouts())
    del shares["s2"]["a.down_proj"]
    with pytest.raises(ValueError, match=r"share s2 differs .* a\.down_proj"):
        judge(shares)
    assert worst([]) == Judgement()
