"""One engine in one process, driven by JSON lines; the benchmarks run several in turn.

Usage (by throughput.py and swap_gap.py): python -m apps.bench.worker KIND ARGUMENTS_AS_JSON
Kinds: slots (INT8 in the slots), slots_no_lanes (the same under vLLM's scheduler), bf16,
compressed (vLLM's own engines), publish (swaps while serving). Answers go to the descriptor that
was stdout; what libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO


class Worker:
    """The parent's side: a process that sleeps on its pipe unless it is asked to run."""

    def __init__(self, kind: str, arguments: dict[str, Any], threads: int, log: Path) -> None:
        self.kind = kind
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "apps.bench.worker", kind, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self.about = self._answer()

    def run(self) -> dict[str, Any]:
        """One measurement."""
        assert self._process.stdin is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"{self.kind} worker ended with {code}; see {self._log.name}")
        return dict(json.loads(line))


def bench_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Distinct random prompts, the same in every process."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (count, length), generator=generator).tolist()


def serve_throughput(kind: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(function that measures once, facts) of a throughput kind."""
    from apps.bench.checkpoints import quantize_checkpoint
    from forge_ptq.engine.build import build_engine, build_stock_engine, sample_batch

    engine_args = arguments["engine_args"]
    about: dict[str, Any] = {"kind": kind}
    if kind in ("slots", "slots_no_lanes"):
        engine = build_engine(engine_args, lanes=kind == "slots")
        bank = engine.vllm_config.quant_config.bank  # type: ignore[union-attr]
        model = Path(engine_args["model"])
        artifact = quantize_checkpoint(model, **arguments["plan"], absmax=arguments["absmax"])
        for _ in bank.fill(1, bank.layout.plan(artifact)):
            pass
        bank.live = 1
        bank.activate(1)
        about |= {"kernel": bank.kernel_name, "slot_bytes": [bank.nbytes(s) for s in (0, 1)]}
    else:
        stock = {"dtype": "bfloat16", "enforce_eager": True, "disable_log_stats": True}
        stock |= {"logprobs_mode": "processed_logprobs", "skip_tokenizer_init": True}
        engine = build_stock_engine({**engine_args, **stock})
    vocab_size = engine.vllm_config.model_config.get_vocab_size()
    prompts = bench_prompts(arguments["sequences"], arguments["prompt_tokens"], vocab_size)
    sample_batch(engine, prompts, 8)  # warm-up

    def measure() -> dict[str, Any]:
        started = time.perf_counter()
        tokens = sample_batch(engine, prompts, arguments["max_tokens"])
        seconds = time.perf_counter() - started
        return {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}

    return measure, about


def serve_publish(arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(function that publishes once while sequences run, facts)."""
    from apps.bench.publish import Publisher

    publisher = Publisher(arguments)
    return publisher.measure, publisher.about


def main() -> None:
    """Build, say what was built, then measure at every line read."""
    kind, arguments = sys.argv[1], json.loads(sys.argv[2])
    answers: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    publish = kind == "publish"
    measure, about = serve_publish(arguments) if publish else serve_throughput(kind, arguments)
    answers.write(json.dumps(about) + "\n")
    answers.flush()
    for _ in sys.stdin:
        answers.write(json.dumps(measure()) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
