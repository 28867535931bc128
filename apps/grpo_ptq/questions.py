"""Questions of a reasoning-gym task in an order that a resumed run can go on with."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptFormat(Protocol):
    """How a question becomes a prompt: the configuration's `dataset` block, and DatasetActor."""

    prompt_template: str
    system_prompt: str | None
    use_chat_template: bool


def prompt_of(question: str, tokenizer: PreTrainedTokenizerBase, form: PromptFormat) -> str:
    """The text that the policy continues."""
    prompt = form.prompt_template.replace("{question}", question)
    if not form.use_chat_template:
        return (form.system_prompt or "") + prompt
    chat = [{"role": "system", "content": form.system_prompt}] if form.system_prompt else []
    chat.append({"role": "user", "content": prompt})
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


SEED_STRIDE = 1_000_003
"""reasoning-gym draws question i of seed s from s + i: without a stride the question sets of
neighbouring seeds would be the same but for one question."""


class QuestionSet:
    """A reasoning-gym task as an endless, reproducible sequence.

    Epoch 0 goes through the questions in order, later epochs in an order drawn from seed and epoch.
    `position` counts questions handed out; setting it resumes there.
    """

    def __init__(self, task: str, task_args: dict[str, Any], size: int, seed: int) -> None:
        import reasoning_gym

        try:
            self._items = reasoning_gym.create_dataset(
                task, size=size, seed=seed * SEED_STRIDE, **task_args
            )
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(
                f"dataset.task: {task!r} with task_args {task_args}: {error}"
            ) from error
        self.task, self.size, self.seed = task, size, seed
        self.position = 0
        self._order: tuple[int, list[int]] | None = None

    @property
    def epoch(self) -> int:
        """Whole passes over the questions so far."""
        return self.position // self.size

    def __next__(self) -> dict[str, Any]:
        """{"question", "answer", "metadata"} as reasoning-gym makes them."""
        index = self.position % self.size
        if self.epoch:
            index = self._shuffled(self.epoch)[index]
        self.position += 1
        return self._items[index]

    def _shuffled(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            order = list(range(self.size))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

    def __iter__(self) -> QuestionSet:
        return self
