"""What the loop is about: questions, rewards, advantages. Light: no model is loaded here.

sample   = await dataset.sample.call_one()          # {"request", "target", "index"}
reward   = await rewards.evaluate_response.route(prompt, text, sample["target"])
advantage = await advantages.compute.call_one(group)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from forge_ptq.runtime import ForgeActor, Reduce, endpoint, record_metric

from .episodes import Group
from .questions import QuestionSet, prompt_of
from .rewards import Scorer

SKIP_LIMIT = 1_000
"""Questions in a row that may be too long for the prompt before the dataset gives up."""


@dataclass
class DatasetActor(ForgeActor):
    """Questions of a reasoning-gym task as prompts. Fields: the configuration's `dataset` block."""

    model: str
    task: str = "chain_sum"
    task_args: dict[str, Any] = field(default_factory=dict)
    size: int = 10_000
    seed: int = 0
    prompt_template: str = "{question}"
    system_prompt: str | None = None
    use_chat_template: bool = False
    max_tokens: int | None = None
    """Longest prompt; longer questions are skipped and counted."""

    def __post_init__(self) -> None:
        super().__init__()

    @endpoint
    async def setup(self) -> None:
        """Loads the tokenizer and builds the question set."""
        # AutoTokenizer gives the same object but imports model code for four times as long.
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(self.model)
        self._questions = QuestionSet(self.task, dict(self.task_args), self.size, self.seed)

    @endpoint
    async def sample(self) -> dict[str, Any]:
        """{"request": prompt text, "target": the question's entry, "index": its position}."""
        for _ in range(SKIP_LIMIT):
            index = self._questions.position
            entry = next(self._questions)
            request = prompt_of(entry["question"], self._tokenizer, self)
            tokens = len(self._tokenizer(request).input_ids)
            if self.max_tokens is None or tokens <= self.max_tokens:
                break
            record_metric("dataset/sample/count_too_long", 1, Reduce.SUM)
        else:
            raise ValueError(
                f"dataset: {SKIP_LIMIT} questions in a row have more than max_req_tokens = "
                f"{self.max_tokens} tokens, the last one {tokens}"
            )
        record_metric("dataset/sample/count_samples_generated", 1, Reduce.SUM)
        record_metric("dataset/sample/avg_sample_len", len(request), Reduce.MEAN)
        record_metric("dataset/sample/current_epoch", self._questions.epoch, Reduce.MAX)
        return {"request": request, "target": entry, "index": index}

    @endpoint
    async def pad_token(self) -> int:
        """Token id to pad with: the tokenizer's own, else its end token."""
        pad = self._tokenizer.pad_token_id
        return int(pad if pad is not None else self._tokenizer.eos_token_id)

    @endpoint
    async def position(self) -> int:
        """Questions handed out so far."""
        return self._questions.position

    @endpoint
    async def seek(self, position: int) -> None:
        """Goes on at `position`, as a resumed run does."""
        if position < 0:
            raise ValueError(f"position: {position}; expected 0 or more")
        self._questions.position = position


@dataclass
class RewardActor(ForgeActor):
    """Scores responses with reasoning-gym's own check of the task. Never raises on any text."""

    task: str = "chain_sum"
    extract: str = "answer_tag"
    format_reward: float = 0.0
    partial_credit: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    @endpoint
    async def setup(self) -> None:
        """Looks the task up."""
        self._scorer = Scorer(
            self.task,
            extract=self.extract,
            format_reward=self.format_reward,
            partial_credit=self.partial_credit,
        )

    @endpoint
    async def evaluate_response(self, prompt: str, response: str, target: dict[str, Any]) -> float:
        """Reward of `response`, in [0, 1 + format_reward]. `target` comes from `sample`."""
        score = self._scorer(response, target)
        name = "reward/evaluate_response"
        record_metric(f"{name}/avg_correct", score.correct, Reduce.MEAN)
        record_metric(f"{name}/avg_formatted", float(score.formatted), Reduce.MEAN)
        record_metric(f"{name}/avg_total_reward", score.reward, Reduce.MEAN)
        record_metric(f"{name}/std_total_reward", score.reward, Reduce.STD)
        record_metric(f"{name}/count_calls", 1, Reduce.SUM)
        return score.reward


def group_advantages(
    rewards: list[float], eps: float = 1e-4, divide_by_std: bool = True
) -> list[float]:
    """(reward - mean) / (std + eps) within one group; all zero where the rewards are equal.

    Without `divide_by_std` just reward - mean, as in Dr. GRPO (arXiv:2503.20783): dividing lets
    questions whose rewards hardly differ count as much as those that are half solved.
    """
    if not all(math.isfinite(r) for r in rewards):
        raise ValueError(f"rewards: {rewards}; expected finite numbers")
    values = torch.tensor(rewards, dtype=torch.float64)
    if len(values) < 2 or bool((values == values[0]).all()):
        return [0.0] * len(values)
    spread = values.std() + eps if divide_by_std else torch.ones_like(values[0])
    return ((values - values.mean()) / spread).tolist()


@dataclass
class ComputeAdvantages(ForgeActor):
    """Advantages of a group relative to its own mean, in units of its own spread if so asked.
    Fields: the configuration's `advantages` block."""

    divide_by_std: bool = True

    def __post_init__(self) -> None:
        super().__init__()

    @endpoint
    async def compute(self, group: Group) -> list[float]:
        """One advantage per episode of the group."""
        rewards = [e.reward for e in group]
        if any(r is None for r in rewards):
            raise ValueError("a group with an episode that has no reward")
        advantages = group_advantages(
            [float(r) for r in rewards if r is not None], divide_by_std=self.divide_by_std
        )
        record_metric(
            "advantages/compute/share_zero_groups", float(not any(advantages)), Reduce.MEAN
        )
        return advantages
