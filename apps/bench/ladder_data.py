"""The rollouts of the ladder: read, and split by prompt into three sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_ptq.rollouts_file import read_rollouts
from forge_ptq.services.sampler import Rollout


def read(path: Path, config: Any) -> list[Rollout]:
    """All rollouts of a file. config: the HF config of the model that they are of."""
    return read_rollouts(
        path, vocab_size=config.vocab_size, max_tokens=config.max_position_embeddings
    )


def split(
    rollouts: Sequence[Rollout], calibrate: int, plan: int, held_out: int
) -> tuple[list[Rollout], ...]:
    """(calibration, plan, held-out) rollouts, disjoint by prompt; ValueError if too few."""
    by_prompt: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        by_prompt.setdefault(rollout.group, []).append(rollout)
    groups = list(by_prompt.values())
    if len(groups) < calibrate + plan + held_out:
        raise ValueError(f"{len(groups)} prompts, {calibrate + plan + held_out} needed")
    parts: tuple[list[Rollout], ...] = ([], [], [])
    counts = (calibrate, plan, held_out)
    for same_prompt in groups:
        # To the part that is furthest from full, so that tasks written in turns are spread.
        emptiest = min(range(3), key=lambda p: len(parts[p]) / counts[p])
        if len(parts[emptiest]) < counts[emptiest]:
            parts[emptiest].append(same_prompt[0])
    return parts
