"""Worked solutions of chain_sum questions, some of them wrong on purpose.

    4 - 13 - 7 =          ->   -9, -16
                               <answer>-16</answer>

The result after every operation, then the answer.

A share `error_rate` of the steps has a wrong result, which the rest of the solution then builds on.
A policy that imitates such data knows how to compute but does not always do it: reinforcement
learning has something to find, and finds it within tens of steps.
"""

from __future__ import annotations

import random
from typing import Any


def solve(entry: dict[str, Any], rng: random.Random, error_rate: float) -> str:
    """The response to a chain_sum entry of reasoning-gym, without the end token."""
    parts = entry["metadata"]["expression"].split()
    total = int(parts[0])
    results = []
    for operator, text in zip(parts[1::2], parts[2::2], strict=True):
        term = int(text)
        result = total + term if operator == "+" else total - term
        if rng.random() < error_rate:
            result += rng.choice((-10, -3, -2, -1, 1, 2, 3, 10))
        results.append(str(result))
        total = result
    return ", ".join(results) + f"\n<answer>{total}</answer>"
