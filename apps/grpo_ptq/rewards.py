"""From a response's text to a reward: find the answer, let reasoning-gym judge it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TAG_LIMIT = 20_000
"""Characters of a response that are looked at, from its end."""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def from_tag(response: str) -> str | None:
    """Text of the last <answer>...</answer>, or None."""
    start = response.rfind("<answer>")
    if start < 0:
        return None
    end = response.find("</answer>", start)
    return response[start + len("<answer>") : end].strip() if end >= 0 else None


def from_last_number(response: str) -> str | None:
    """The last number in the text, or None."""
    found = _NUMBER.findall(response)
    return found[-1] if found else None


EXTRACT: dict[str, Callable[[str], str | None]] = {
    "answer_tag": from_tag,
    "last_number": from_last_number,
    "tag_or_last_number": lambda text: from_tag(text) or from_last_number(text),
}
"""Ways to find the answer. The tag trains a format along with the task."""


@dataclass(frozen=True)
class Score:
    """What one response earned."""

    reward: float
    correct: float
    """The task's own score, in [0, 1]."""
    formatted: bool
    """An answer could be found."""


class Scorer:
    """Callable (response, target) -> Score for one task.

    reasoning-gym gives some tasks partial credit; chain_sum for example scores a wrong answer that
    contains the right digits. A policy learns to exploit that, so anything short of the full score
    counts as zero unless `partial_credit`. `format_reward` is added when an answer was found.
    """

    def __init__(
        self,
        task: str,
        *,
        extract: str = "answer_tag",
        format_reward: float = 0.0,
        partial_credit: bool = False,
    ) -> None:
        import reasoning_gym

        if extract not in EXTRACT:
            raise ValueError(f"extract: {extract!r}; expected one of {sorted(EXTRACT)}")
        self._judge: Callable[..., float] = reasoning_gym.get_score_answer_fn(task)
        self._extract = EXTRACT[extract]
        self._format_reward = format_reward
        self._partial_credit = partial_credit

    def __call__(self, response: str, target: dict[str, Any]) -> Score:
        answer = self._extract(response[-TAG_LIMIT:])
        if answer is None:
            return Score(reward=0.0, correct=0.0, formatted=False)
        correct = self._score(answer, target)
        if correct < 1.0 and not self._partial_credit:
            correct = 0.0
        return Score(reward=correct + self._format_reward, correct=correct, formatted=True)

    def _score(self, answer: str, target: dict[str, Any]) -> float:
        """The task's score in [0, 1]; 0 where the task's own parser fails on the text."""
        try:
            score = float(self._judge(answer=answer, entry=target))
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            SyntaxError,
            TypeError,
            ValueError,
        ):
            return 0.0
        return min(max(score, 0.0), 1.0) if score == score else 0.0  # NaN compares unequal
