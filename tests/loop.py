"""The real command on a small random policy, for tests that watch the whole loop: processes, files
and exit codes."""

from __future__ import annotations

from pathlib import Path

from apps.bench.session import Session as Run

__all__ = ["Run", "make_policy"]


def make_policy(folder: Path) -> Path:
    """A tiny Qwen3 policy with random weights: trains and generates, knows nothing."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from forge_ptq.models import tiny
    from forge_ptq.models.checkpoint import write_folder

    config = tiny.config_dict(hidden=192, layers=2, intermediate=256)

    def fill(target: Path) -> None:
        tiny.write_assets(target, config)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen3Config(**config)).to(torch.bfloat16)
        model.save_pretrained(target)

    return write_folder(folder, fill, {"kind": "random tiny policy"})
