"""The scale benchmark at a tiny size, and its simulation against the formula."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from apps.bench import merge_scale
from apps.bench.round_failures import (
    SCENARIOS,
    exact_failure_rate,
    failure_rate,
    finished_shares,
)
from forge_ptq.numerics.stats_table import pack, unpack

LAYOUT = merge_scale.llama_layout(layers=3, hidden=6, intermediate=10)


def test_it_runs_and_writes_its_figures(tmp_path, monkeypatch):
    out = tmp_path / "scale.json"
    sizes = "--ranks 3 5 --layers 3 --hidden 6 --intermediate 10 --mergers 1 4"
    rounds = "--dropouts 0 0.2 --rounds 2 --target-rounds 1"
    command = ["bench", *sizes.split(), *rounds.split(), "--out", str(out)]
    monkeypatch.setattr("sys.argv", command)
    threads = torch.get_num_threads()
    try:
        merge_scale.main()
    finally:
        torch.set_num_threads(threads)
    record = json.loads(out.read_text())
    assert [(row["ranks"], row["mergers"]) for row in record["merge"]] == [
        (3, 1), (3, 4), (5, 1), (5, 4),
    ]  # fmt: skip
    table = pack(unpack(merge_scale.share_table(LAYOUT, 0), LAYOUT), LAYOUT)
    size = sum(tensor.nbytes for tensor in table.values())
    for row in record["merge"]:
        assert row["bytes_read_all_mergers"] == row["ranks"] * size
        assert row["bytes_read_largest_merger"] <= size * row["ranks"] / row["mergers"] * 1.35
    assert len(record["failed_rounds"]) == 2 * 2 * 2


@pytest.mark.parametrize("rule", ["histogram", "median"])
def test_slices_of_mergers_make_up_the_whole(rule):
    tables = [merge_scale.share_table(LAYOUT, seed) for seed in range(5)]
    whole, _ = merge_scale.merge_slice(tables, LAYOUT, rule)
    for start, stop in LAYOUT.split(2):
        rows = LAYOUT.row_slices(start, stop)
        cut = [{name: table[name][rows[name]] for name in table} for table in tables]
        piece, left_out = merge_scale.merge_slice(cut, LAYOUT.cut(start, stop), rule)
        assert left_out == 0
        for name, tensor in piece.items():
            assert torch.equal(tensor, whole[name][rows[name]])


@pytest.mark.parametrize("oversample", [1.0, 1.2])
def test_absent_replicas_fail_rounds_as_the_binomial_says(oversample):
    exact = exact_failure_rate(13, oversample, 0.2, 0.85)
    assert 0.05 < exact < 0.95
    rounds = 400
    simulated = failure_rate(13, oversample, 0.2, 0.85, SCENARIOS[0], rounds)
    assert abs(simulated - exact) < 4 * math.sqrt(exact * (1 - exact) / rounds)


def test_the_formula_by_hand():
    # 3 shares of 3 replicas, quorum 0.85: all three must come.
    assert exact_failure_rate(3, 1.0, 0.1, 0.85) == pytest.approx(1 - 0.9**3)
    # One spare: 3 shares of 4 replicas; two or more absent fail it.
    two_absent = 1 - 0.9**4 - 4 * 0.1 * 0.9**3
    assert exact_failure_rate(4, 1.2, 0.1, 0.85) == pytest.approx(two_absent)
    assert exact_failure_rate(128, 1.2, 0.1, 0.85) < 0.005 < exact_failure_rate(128, 1, 0.1, 0.85)


def test_spares_and_time_rescue_the_shares_of_the_dead():
    rng = random.Random(0)
    absent, tight, relaxed = SCENARIOS
    assert finished_shares(10, 10, 0.0, absent, rng) == 10
    means = [
        sum(finished_shares(10, shares, 0.3, scenario, rng) for _ in range(30)) / 30 / shares
        for shares, scenario in ((10, absent), (10, tight), (8, tight), (8, relaxed))
    ]
    assert means[0] <= means[1] + 0.05 < means[2] + 0.05
    assert means[3] == 1.0
