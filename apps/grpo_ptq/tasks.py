"""What the loop is about: questions, episodes, rewards, advantages. Light: no model is loaded here.

sample   = await dataset.sample.call_one()          # {"request", "target", "index"}
reward   = await rewards.evaluate_response.route(prompt, text, sample["target"])
advantage = await advantages.compute.call_one(group)
inputs, targets = collate(batches)                   # one list entry per data-parallel rank
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from forge_ptq.runtime import Completion, ForgeActor, Reduce, endpoint, record_metric

from .questions import QuestionSet
from .rewards import Scorer


@dataclass
class Episode:
    """One response to one prompt, and what was learned about it.

    Prompts are padded on the left to `request_len`, responses on the right to `response_len`.
    The lengths, not the pad id, say what is padding: a response may contain the pad id.
    """

    episode_id: str
    pad_id: int
    request_len: int
    response_len: int
    target: Any = None
    completion: Completion | None = None
    ref_logprobs: torch.Tensor | None = None
    """[response_len] fp32, log-probabilities under the reference policy."""
    reward: float | None = None
    advantage: float | None = None

    def _completion(self) -> Completion:
        if self.completion is None:
            raise ValueError(f"episode {self.episode_id} has no completion yet")
        return self.completion

    @property
    def policy_version(self) -> int | None:
        """Version of the policy that sampled every token of the response."""
        return self._completion().generator_version

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt, padding not counted."""
        return len(self._completion().prompt_ids)

    @property
    def response_length(self) -> int:
        """Tokens of the response, the end token included, padding not counted."""
        return len(self._completion().token_ids)

    @property
    def request_tensor(self) -> torch.Tensor:
        """[request_len] int64, padded on the left."""
        ids = torch.as_tensor(self._completion().prompt_ids, dtype=torch.long)
        room = self.request_len - len(ids)
        if room < 0:
            raise ValueError(
                f"max_req_tokens: {self.request_len}; this prompt has {len(ids)} tokens"
            )
        return F.pad(ids, (room, 0), value=self.pad_id)

    @property
    def response_tensor(self) -> torch.Tensor:
        """[response_len] int64, padded on the right."""
        ids = torch.as_tensor(self._completion().token_ids, dtype=torch.long)
        return F.pad(ids, (0, self._room()), value=self.pad_id)

    @property
    def response_mask(self) -> torch.Tensor:
        """[response_len] bool, true on the tokens that the policy sampled."""
        return torch.arange(self.response_len) < self.response_length

    @property
    def generator_logprobs(self) -> torch.Tensor:
        """[response_len] fp32, log-probabilities under the generator; 0 on padding."""
        logprobs = self._completion().logprobs
        if logprobs is None:
            raise ValueError(f"episode {self.episode_id}: its completion has no logprobs")
        values = torch.as_tensor(logprobs, dtype=torch.float32)
        if values.shape != (self.response_length,):
            raise ValueError(
                f"episode {self.episode_id}: {tuple(values.shape)} logprobs for "
                f"{self.response_length} tokens"
            )
        return F.pad(values, (0, self._room()))

    def _room(self) -> int:
        room = self.response_len - self.response_length
        if room < 0:
            raise ValueError(
                f"max_res_tokens: {self.response_len}; this response has "
                f"{self.response_length} tokens"
            )
        return room


Group = list[Episode]
"""The responses to one prompt."""


def collate(batches: list[Group]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Episodes to tensors, one (inputs, targets) pair per data-parallel rank.

    inputs: tokens [B, request_len + response_len] int64, prompt_lens [B] int64, rewards [B] fp32
    (for the record).
    targets: response [B, R] int64, padding_mask [B, R] bool, ref_logprobs [B, R] fp32,
    generator_logprobs [B, R] fp32, advantages [B, 1] fp32.
    """
    inputs, targets = [], []
    for batch in batches:
        missing = [e.episode_id for e in batch if e.ref_logprobs is None or e.advantage is None]
        if missing:
            raise ValueError(f"episodes without ref_logprobs or advantage: {missing[:3]}")
        request = torch.stack([e.request_tensor for e in batch])
        response = torch.stack([e.response_tensor for e in batch])
        ref_logprobs = [torch.as_tensor(e.ref_logprobs, dtype=torch.float32) for e in batch]
        inputs.append(
            {
                "tokens": torch.cat([request, response], dim=1),
                "prompt_lens": torch.tensor([e.prompt_length for e in batch]),
                "rewards": torch.tensor([e.reward for e in batch], dtype=torch.float32),
            }
        )
        targets.append(
            {
                "response": response,
                "padding_mask": torch.stack([e.response_mask for e in batch]),
                "ref_logprobs": torch.stack(ref_logprobs),
                "generator_logprobs": torch.stack([e.generator_logprobs for e in batch]),
                "advantages": torch.tensor([[e.advantage] for e in batch], dtype=torch.float32),
            }
        )
    return inputs, targets


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

    def _request(self, question: str) -> str:
        prompt = self.prompt_template.replace("{question}", question)
        if not self.use_chat_template:
            return (self.system_prompt or "") + prompt
        chat = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        chat.append({"role": "user", "content": prompt})
        return str(
            self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        )

    @endpoint
    async def sample(self) -> dict[str, Any]:
        """{"request": prompt text, "target": the question's entry, "index": its position}."""
        for _ in range(SKIP_LIMIT):
            index = self._questions.position
            entry = next(self._questions)
            request = self._request(entry["question"])
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


def group_advantages(rewards: list[float], eps: float = 1e-4) -> list[float]:
    """(reward - mean) / (std + eps) within one group; all zero where the rewards are equal."""
    if not all(math.isfinite(r) for r in rewards):
        raise ValueError(f"rewards: {rewards}; expected finite numbers")
    values = torch.tensor(rewards, dtype=torch.float64)
    if len(values) < 2 or bool((values == values[0]).all()):
        return [0.0] * len(values)
    return ((values - values.mean()) / (values.std() + eps)).tolist()


@dataclass
class ComputeAdvantages(ForgeActor):
    """Advantages of a group relative to its own mean, in units of its own spread."""

    def __post_init__(self) -> None:
        super().__init__()

    @endpoint
    async def compute(self, group: Group) -> list[float]:
        """One advantage per episode of the group."""
        rewards = [e.reward for e in group]
        if any(r is None for r in rewards):
            raise ValueError("a group with an episode that has no reward")
        advantages = group_advantages([float(r) for r in rewards if r is not None])
        record_metric(
            "advantages/compute/share_zero_groups", float(not any(advantages)), Reduce.MEAN
        )
        return advantages
