"""Merging the statistics of 8 to 512 ranks of an 8B model, and how often a round would fail.

Usage: python -m apps.bench.merge_scale

- merge: every share is a packed table of Llama-3-8B's sites (32 layers, hidden 4096, intermediate
  14336, 4 sites a layer). M merger ranks read a row slice of every share each, judge and reduce it
  with the code that the StatsMerger runs; here they run one after another on one thread. Seconds
  are those of the slowest rank, without transport; bytes are what a rank reads. Slices are worked
  through a few sites at a time, which is exact (sites do not see each other) and bounds the
  memory of this simulation.
- rounds: see round_failures.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from apps.bench.options import write
from apps.bench.round_failures import SCENARIOS, exact_failure_rate, failure_rate
from forge_ptq.numerics.merge import RULES, judge, reduce
from forge_ptq.numerics.stats import BINS
from forge_ptq.numerics.stats_table import Layout, pack, unpack

Table = dict[str, torch.Tensor]

SIGMA_CLIP = 25.0
SITES_AT_ONCE = 4
QUORUM = 0.85


def llama_layout(layers: int, hidden: int, intermediate: int) -> Layout:
    """Sites of a Llama: q/k/v, o, gate/up and down of every layer."""
    widths = {
        "self_attn.q_proj": hidden,
        "self_attn.o_proj": hidden,
        "mlp.gate_proj": hidden,
        "mlp.down_proj": intermediate,
    }
    return Layout(
        tuple(
            (f"model.layers.{layer}.{leaf}", width)
            for layer in range(layers)
            for leaf, width in widths.items()
        )
    )


def share_table(layout: Layout, seed: int, tokens: int = 4096) -> Table:
    """A made-up packed table, plausible enough to be judged: ranges, counts and sums."""
    generator = torch.Generator().manual_seed(seed)
    table: Table = {}
    for name, (shape, dtype) in layout.shapes().items():
        noise = torch.rand(shape, generator=generator)
        if name == "histogram":
            table[name] = (noise * tokens).to(dtype)
        elif name == "scalars":
            table[name] = torch.stack(
                [torch.full((shape[0],), float(tokens)), noise[:, 0], torch.zeros(shape[0])], dim=1
            ).to(dtype)
        else:
            table[name] = (1 + noise).to(dtype)
    assert table["histogram"].shape[1] == BINS
    return table


def share_tables(layout: Layout, count: int) -> list[Table]:
    """Tables of several shares, each in memory of its own, with ranges that differ."""
    base = share_table(layout, 0)
    tables = []
    for number in range(count):
        table = {name: tensor.clone() for name, tensor in base.items()}
        for name in table:
            if name.startswith("absmax"):
                table[name] *= 1 + number / count
        tables.append(table)
    return tables


def merge_slice(tables: list[Table], layout: Layout, rule: str) -> tuple[Table, int]:
    """What a merger rank does with its rows of every share: (merged rows, shares left out)."""
    shares = {f"share-{n:04d}": unpack(table, layout) for n, table in enumerate(tables)}
    judged = judge(shares)
    kept = {share: shares[share] for share in shares if not judged[share].reason(SIGMA_CLIP)}
    return pack(reduce(kept, rule), layout), len(shares) - len(kept)


def merge_once(layout: Layout, ranks: int, mergers: int, rule: str) -> dict[str, Any]:
    """Seconds and bytes of each of the merger ranks, for the shares of ``ranks`` replicas."""
    seconds, read = [], []
    for start, stop in layout.split(mergers):
        spent, size = 0.0, 0
        for first in range(start, stop, SITES_AT_ONCE):
            piece = layout.cut(first, min(first + SITES_AT_ONCE, stop))
            tables = share_tables(piece, ranks)
            size += sum(tensor.nbytes for table in tables for tensor in table.values())
            began = time.perf_counter()
            _, left_out = merge_slice(tables, piece, rule)
            spent += time.perf_counter() - began
            assert not left_out
        seconds.append(spent)
        read.append(size)
    return {
        "ranks": ranks,
        "mergers": mergers,
        "rule": rule,
        "seconds_slowest_merger": max(seconds),
        "seconds_all_mergers": sum(seconds),
        "bytes_per_share": sum(read) // ranks,
        "bytes_read_largest_merger": max(read),
        "bytes_read_all_mergers": sum(read),
    }


def failures(ranks: int, dropout: float, oversample: float, rounds: int) -> dict[str, Any]:
    """Failure rates of one setting: the formula's, and of simulated rounds per scenario."""
    simulated = {
        scenario.name: failure_rate(ranks, oversample, dropout, QUORUM, scenario, rounds)
        for scenario in SCENARIOS
    }
    return {
        "ranks": ranks,
        "dropout": dropout,
        "oversample": oversample,
        "exact, absent": exact_failure_rate(ranks, oversample, dropout, QUORUM),
        "simulated_rounds": rounds,
        **simulated,
    }


def simulated_rounds(ranks: int, dropout: float, most: int) -> int:
    """How many rounds to simulate: one costs about the square of its size, none fails alike."""
    return max(1, min(most, most * 128**2 // ranks**2)) if dropout else 1


def main() -> None:
    """Measure, print, write JSON."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512])
    cli.add_argument("--mergers", type=int, nargs="+", default=[1, 8])
    cli.add_argument("--layers", type=int, default=32)
    cli.add_argument("--hidden", type=int, default=4096)
    cli.add_argument("--intermediate", type=int, default=14336)
    cli.add_argument("--dropouts", type=float, nargs="+", default=[0.0, 0.05, 0.1, 0.15, 0.2])
    cli.add_argument("--rounds", type=int, default=200, help="simulated, up to 128 ranks")
    cli.add_argument("--target-rounds", type=int, default=1000, help="at 128 ranks, 10 %% dropouts")
    cli.add_argument("--threads", type=int, default=1)
    cli.add_argument("--out", type=Path, default=Path("docs/results/merge_scale.json"))
    options = cli.parse_args()
    torch.set_num_threads(options.threads)
    layout = llama_layout(options.layers, options.hidden, options.intermediate)
    merges = [
        merge_once(layout, ranks, mergers, "histogram")
        for ranks in options.ranks
        for mergers in options.mergers
    ]
    some = min(options.ranks, key=lambda ranks: abs(ranks - 64))
    rules = [merge_once(layout, some, max(options.mergers), rule) for rule in RULES]
    rounds = [
        failures(ranks, dropout, factor, simulated_rounds(ranks, dropout, options.rounds))
        for ranks in options.ranks
        for dropout in options.dropouts
        for factor in (1.0, 1.2)
    ]
    target = failures(128, 0.1, 1.2, options.target_rounds)
    results = {"merge": merges, "rules": rules, "quorum": QUORUM}
    write(options, {**results, "target": target, "failed_rounds": rounds})


if __name__ == "__main__":
    main()
