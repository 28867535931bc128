"""Worked solutions of chain_sum questions, some without the tag that the reward asks for.

    4 - 13 - 7 =          ->   -9, -16
                               <answer>-16</answer>        or just       -16

The result after every operation, then the answer. A share `untagged_rate` of the solutions gives
the answer bare. A policy that imitates such data can compute but does not always answer in the form
that counts: reinforcement learning has something to find, and finds it within tens of steps.
"""

from __future__ import annotations

import random
from typing import Any


def solve(entry: dict[str, Any], rng: random.Random, untagged_rate: float) -> str:
    """The response to a chain_sum entry of reasoning-gym, without the end token."""
    parts = entry["metadata"]["expression"].split()
    total = int(parts[0])
    results = []
    for operator, text in zip(parts[1::2], parts[2::2], strict=True):
        term = int(text)
        total = total + term if operator == "+" else total - term
        results.append(str(total))
    answer = str(total) if rng.random() < untagged_rate else f"<answer>{total}</answer>"
    return ", ".join(results) + f"\n{answer}"
