"""Options that both benchmarks share, and where results go."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def parser(description: str | None, out: str) -> argparse.ArgumentParser:
    """An argument parser with the shared options."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--model", required=True, help="local bf16 HF checkpoint")
    options.add_argument("--default", default="int8_dynamic", help="scheme of the plan")
    options.add_argument(
        "--override", action="append", default=[], metavar="PATTERN=SCHEME", help="of the plan"
    )
    options.add_argument("--absmax", type=float, default=8.0, help="of static layers' inputs")
    options.add_argument("--sequences", type=int, default=16, help="concurrent sequences")
    options.add_argument("--prompt-tokens", type=int, default=32)
    options.add_argument("--max-tokens", type=int, default=128)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options.add_argument("--out", type=Path, default=Path("docs/results") / out)
    return options


def worker_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """What a worker needs to know."""
    longest = options.prompt_tokens + options.max_tokens
    overrides = dict(entry.split("=", 1) for entry in options.override)
    return {
        "engine_args": {
            "model": options.model,
            "max_model_len": longest + 16,
            "max_num_seqs": max(16, options.sequences),
            "enable_prefix_caching": False,
        },
        "plan": {"default": options.default, "overrides": overrides},
        "absmax": options.absmax,
        "sequences": options.sequences,
        "prompt_tokens": options.prompt_tokens,
        "max_tokens": options.max_tokens,
    }


def summary(values: list[float]) -> dict[str, Any]:
    """Median, extremes and the values themselves."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "values": values,
    }


def write(options: argparse.Namespace, results: dict[str, Any], *, quiet: bool = False) -> None:
    """Results with the settings and machine that made them, as JSON; also printed unless quiet."""
    import torch

    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    if "model" in settings:
        settings["model"] = Path(options.model).name
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": settings,
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "vnni": torch.cpu._is_vnni_supported(),
            "cores": os.cpu_count(),
        },
        **results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    if not quiet:
        print(json.dumps(results, indent=1))
        print(f"written to {options.out}")
