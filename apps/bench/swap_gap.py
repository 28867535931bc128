"""What a publish costs the sequences that run meanwhile, and what lanes cost without one.

Usage: python -m apps.bench.swap_gap --model models/smollm2_135m --override '*.down_proj=bf16'

- pause: the longest time that admitted sequences waited between two of their steps while a version
  was staged, probed and committed, next to the usual step time.
- lanes: tokens per second with our scheduler and one lane against vLLM's own scheduler, both on
  the same slots, in two processes that run in turn.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from apps.bench.options import parser, summary, worker_arguments, write
from apps.bench.throughput import measure
from apps.bench.worker import Worker


def main() -> None:
    """Measure, print, write JSON."""
    cli = parser(__doc__, "swap_gap.json")
    cli.add_argument("--probes", type=int, default=8, help="sequences probed per publish")
    cli.add_argument("--idle-lane-tokens", type=int, default=None, help="default: by device")
    options = cli.parse_args()
    arguments = worker_arguments(options)
    arguments |= {"probes": options.probes, "idle_lane_tokens": options.idle_lane_tokens}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        publisher = Worker("publish", arguments, options.threads, Path(scratch) / "publish.log")
        try:
            runs = [publisher.run() for _ in range(options.rounds)]
        finally:
            publisher.close()
        workers: list[Worker] = []
        try:
            for kind in ("slots", "slots_no_lanes"):
                log = Path(scratch) / f"{kind}.log"
                workers.append(Worker(kind, arguments, options.threads, log))
            lanes = measure(workers, options.rounds)
        finally:
            for worker in workers:
                worker.close()
    columns = {key: summary([run[key] for run in runs]) for key in runs[0]}
    write(options, {"publish": columns, "kernel": publisher.about["kernel"], "lanes": lanes})


if __name__ == "__main__":
    main()
