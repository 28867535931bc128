"""What collecting calibration statistics costs, as a share of the forward pass it rides on.

Usage: python -m apps.bench.collect --model models/smollm2_135m

Every round runs the same batch five times in turn: without observer, with one, and with one that
also shifts channels (as in the second pass of a calibration with smoothing), both in C++ and in
plain torch (``torch_*``: what a machine without compiler gets). The batch has full rows in one half
of the rounds and right padding in the other. Every share compares neighbours of one round, so that
a machine whose speed drifts favours neither; next to wall time stands CPU time, which a busy
machine disturbs less. Without a compiled kernel it refuses to measure.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from apps.bench.options import summary, write
from forge_ptq.numerics import observer_native
from forge_ptq.numerics.observer import ActivationObserver
from forge_ptq.numerics.plan import never_quantized, sites_of


def batch(sequences: int, tokens: int, vocabulary: int, padded: bool) -> tuple[Any, Any]:
    """(tokens_BT, mask_BT); padded rows have between half and all of the positions."""
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(0, vocabulary, (sequences, tokens), generator=generator)
    lengths_B = torch.full((sequences,), tokens)
    if padded:
        lengths_B = torch.linspace(tokens // 2, tokens, sequences).long()
    return tokens_BT, torch.arange(tokens) < lengths_B[:, None]


def measure(model: Any, tokens_BT: Any, mask_BT: Any, rounds: int) -> dict[str, Any]:
    """Seconds of a forward pass in all variants, and the shares they add."""
    linears = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    sites = sites_of(name for name in linears if not never_quantized(name))
    widths = {site: model.get_submodule(site).in_features for site in sites}
    shift = {site: (torch.arange(width) % 7 - 3).to(torch.int8) for site, width in widths.items()}
    variants: dict[str, dict[str, Any]] = {
        "observed": {},
        "observed_shifted": {"shift": shift},
        "torch_observed": {"compiled": False},
        "torch_observed_shifted": {"shift": shift, "compiled": False},
    }
    kinds = ("plain", *variants)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu_seconds: dict[str, list[float]] = {kind: [] for kind in kinds}

    def forward(kind: str) -> None:
        start, cpu = time.perf_counter(), time.process_time()
        model.base_model(input_ids=tokens_BT, use_cache=False)
        cpu_seconds[kind].append(time.process_time() - cpu)
        seconds[kind].append(time.perf_counter() - start)

    for _ in range(rounds):
        forward("plain")
        for kind, options in variants.items():
            with ActivationObserver(model, sites, **options) as observer:
                observer.mask_BT = mask_BT
                forward(kind)
                observer.take()
    elements = sum(widths.values()) * int(mask_BT.sum())
    per_element = 1e9 / elements
    return {
        "seconds": {kind: summary(values) for kind, values in seconds.items()},
        "share": shares(seconds),
        "share_of_cpu_time": shares(cpu_seconds),
        "nanoseconds_per_element": {
            kind: per_element
            * (statistics.median(cpu_seconds[kind]) - statistics.median(cpu_seconds["plain"]))
            for kind in kinds[1:]
        },
        "sites": len(sites),
        "elements": elements,
    }


def shares(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """What every kind adds to the plain pass of its own round."""
    plain = seconds["plain"]
    return {
        kind: summary([s / p - 1 for s, p in zip(values, plain, strict=True)])
        for kind, values in seconds.items()
        if kind != "plain"
    }


@torch.no_grad()
def main() -> None:
    """Measure, print, write JSON."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--model", required=True, help="local HF checkpoint")
    cli.add_argument("--sequences", type=int, default=16)
    cli.add_argument("--tokens", type=int, default=200, help="positions per sequence")
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--threads", type=int, default=1)
    cli.add_argument("--dtype", default="float32")
    cli.add_argument("--out", type=Path, default=Path("docs/results/collect.json"))
    options = cli.parse_args()
    from transformers import AutoModelForCausalLM

    if observer_native.kernel() is None:
        cli.error("no compiled kernel on this machine, see the warning above")
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    results: dict[str, Any] = {}
    for name, padded in ("full", False), ("padded", True):
        data = batch(options.sequences, options.tokens, model.config.vocab_size, padded)
        if not results:
            model.base_model(input_ids=data[0], use_cache=False)  # warm up
        results[name] = measure(model, *data, options.rounds)
    write(options, results)


if __name__ == "__main__":
    main()
