"""Tokens per second of the INT8 slots against vLLM's bf16 and vLLM's own compressed-tensors INT8.

Usage: python -m apps.bench.throughput --model models/smollm2_135m --override '*.down_proj=bf16'

Three engines in three processes with the same threads, batch and lengths; they run in turn, one at
a time, so that a change of the machine's speed hits all alike. Compare the ratios: each is the
median over rounds of the quotient within a round.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from apps.bench.checkpoints import quantize_checkpoint
from apps.bench.options import parser, summary, worker_arguments, write
from apps.bench.worker import Worker
from forge_ptq.compressed import save_compressed

KINDS = ("slots", "bf16", "compressed")


def main() -> None:
    """Measure, print, write JSON."""
    options = parser(__doc__, "throughput.json").parse_args()
    arguments = worker_arguments(options)
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        compressed = Path(scratch) / "compressed"
        artifact = quantize_checkpoint(
            Path(options.model), **arguments["plan"], absmax=options.absmax
        )
        compressed.mkdir()
        save_compressed(artifact, options.model, compressed)
        try:
            for kind in KINDS:
                engine_args = dict(arguments["engine_args"])
                if kind == "compressed":
                    engine_args["model"] = str(compressed)
                log = Path(scratch) / f"{kind}.log"
                print(f"starting {kind} ...", flush=True)
                own = {**arguments, "engine_args": engine_args}
                workers.append(Worker(kind, own, options.threads, log))
            write(options, measure(workers, options.rounds))
        finally:
            for worker in workers:
                worker.close()


def measure(workers: list[Worker], rounds: int) -> dict[str, Any]:
    """Rounds of one run each; the order turns by one every round."""
    rates: dict[str, list[float]] = {worker.kind: [] for worker in workers}
    for turn in range(rounds):
        shift = turn % len(workers)
        for worker in workers[shift:] + workers[:shift]:
            rates[worker.kind].append(worker.run()["tokens_per_s"])
        print(f"round {turn + 1}: " + ", ".join(f"{k} {v[-1]:.0f}" for k, v in rates.items()))
    first = workers[0].kind
    return {
        "workers": [worker.about for worker in workers],
        "tokens_per_s": {kind: summary(values) for kind, values in rates.items()},
        "ratio": {
            f"{first}/{kind}": statistics.median(
                ours / theirs for ours, theirs in zip(rates[first], values, strict=True)
            )
            for kind, values in rates.items()
            if kind != first
        },
    }


if __name__ == "__main__":
    main()
