"""Rollouts in a file: JSON lines, one response per line.

    {"prompt_ids": [..], "token_ids": [..], "reward": 0.0, "prompt": "..."}

prompt_ids and token_ids (of the response) are required, everything else is optional or ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from forge_ptq.services.sampler import Rollout, prompt_digest

SHOWN = 5
"""Problems listed before the rest is only counted."""


class RolloutFileError(ValueError):
    """A file that cannot be used; the message gives the line numbers and what is wrong there."""


def read_rollouts(path: Path, *, vocab_size: int, max_tokens: int) -> list[Rollout]:
    """All rollouts of a file, in order, as of policy version 0.

    max_tokens: of prompt and response together. RolloutFileError names every line that is not
    usable (the first few), or says that the file cannot be read or has no line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RolloutFileError(f"{path}: cannot be read: {error}") from error
    rollouts: list[Rollout] = []
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rollouts.append(_parse(line, vocab_size, max_tokens))
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        rest = len(problems) - SHOWN
        shown = problems[:SHOWN] + ([f"and {rest} more lines"] if rest > 0 else [])
        raise RolloutFileError("\n".join(f"{path}: {problem}" for problem in shown))
    if not rollouts:
        raise RolloutFileError(f"{path}: is empty, expected one rollout per line")
    return rollouts


def _parse(line: str, vocab_size: int, max_tokens: int) -> Rollout:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, got {type(record).__name__}")
    prompt, response = (_ids(record, key, vocab_size) for key in ("prompt_ids", "token_ids"))
    length = len(prompt) + len(response)
    if length > max_tokens:
        raise ValueError(f"prompt and response have {length} tokens, the model takes {max_tokens}")
    reward = record.get("reward", 0.0)
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise ValueError(f"reward is {reward!r}, expected a number")
    try:
        reward = float(reward)
    except OverflowError as error:
        raise ValueError("reward is too large for a float") from error
    if not math.isfinite(reward):
        raise ValueError(f"reward is {reward!r}, expected a finite number")
    return Rollout(prompt + response, len(prompt), reward, 0, prompt_digest(prompt))


def _ids(record: dict[str, Any], key: str, vocab_size: int) -> list[int]:
    if key not in record:
        raise ValueError(f"{key} is missing")
    ids = record[key]
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError(f"{key} must be a list of integers")
    if not ids:
        raise ValueError(f"{key} is empty")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(
            f"{key} holds token {outside[0]}, the model's vocabulary has {vocab_size}: "
            "rollouts of another model?"
        )
    return ids


def split(
    rollouts: Sequence[Rollout], *, plan: bool
) -> tuple[list[Rollout], list[Rollout], list[Rollout]]:
    """(calibration, plan, held out), disjoint by prompt and independent of the file's order.

    A quarter of the prompts is held out, another quarter decides plans if ``plan``. With fewer than
    four prompts everything calibrates.
    """
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    ordered = [groups[digest] for digest in sorted(groups)]
    quarter = len(ordered) // 4
    cuts = [0, quarter, 2 * quarter if plan else quarter, len(ordered)]
    held_out, planned, calibration = (
        [rollout for group in ordered[start:end] for rollout in group]
        for start, end in pairwise(cuts)
    )
    return calibration, planned, held_out
