"""Episodes: one response and what was learned about it; how they become a training batch, and what
the batch says of the weights that sampled it.

inputs, targets = collate(batches)                     # one list entry per data-parallel rank
metrics = await trainer.train_step.call(inputs, targets)
rows = await trainer.sequence_mismatch.call_one()
records = mismatch_records(inputs, rows, step)         # for the guard's probation
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from forge_ptq.mismatch import Row, SequenceMismatch
from forge_ptq.runtime import Completion
from forge_ptq.services.sampler import prompt_digest


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
    def artifact_id(self) -> str:
        """Of the weights that sampled the response; empty where the generator names none."""
        return str(self._metadata().get("artifact_id", ""))

    @property
    def scheme(self) -> str:
        """In which these weights served, such as int8_static+bf16; "unknown" where not told."""
        return str(self._metadata().get("scheme", "unknown"))

    @property
    def group(self) -> str:
        """Names the prompt: responses to the same one share it."""
        return prompt_digest([int(token) for token in self._completion().prompt_ids])

    def _metadata(self) -> dict[str, Any]:
        return self._completion().metadata or {}

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

    inputs: tokens [B, request_len + response_len] int64, prompt_lens [B] int64, and for the record,
    one per episode: rewards [B] fp32, and lists policy_versions, schemes, artifact_ids, groups,
    sampled_finite (whether all generator_logprobs are).
    targets: response [B, R] int64, padding_mask [B, R] bool, ref_logprobs [B, R] fp32,
    generator_logprobs [B, R] fp32, advantages [B, 1] fp32.
    """
    inputs, targets = [], []
    for batch in batches:
        missing = [
            e.episode_id
            for e in batch
            if e.ref_logprobs is None or e.advantage is None or e.policy_version is None
        ]
        if missing:
            raise ValueError(f"episodes without ref_logprobs, advantage or version: {missing[:3]}")
        request = torch.stack([e.request_tensor for e in batch])
        response = torch.stack([e.response_tensor for e in batch])
        ref_logprobs = [torch.as_tensor(e.ref_logprobs, dtype=torch.float32) for e in batch]
        inputs.append(
            {
                "tokens": torch.cat([request, response], dim=1),
                "prompt_lens": torch.tensor([e.prompt_length for e in batch]),
                "rewards": torch.tensor([e.reward for e in batch], dtype=torch.float32),
                "policy_versions": [e.policy_version for e in batch],
                "schemes": [e.scheme for e in batch],
                "artifact_ids": [e.artifact_id for e in batch],
                "groups": [e.group for e in batch],
                "sampled_finite": [bool(e.generator_logprobs.isfinite().all()) for e in batch],
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


def mismatch_records(
    inputs: list[dict[str, Any]], per_sequence: Sequence[Row], step: int
) -> list[SequenceMismatch]:
    """What each trained sequence says of the weights that sampled it.

    `inputs` as `collate` made them, `per_sequence` as TitanTrainer.sequence_mismatch returns it
    after that step, `step` the trainer steps done before it, which is the version that it trained.
    ValueError where the two do not have one entry per sequence.
    """
    episodes = [
        values
        for part in inputs
        for values in zip(
            part["artifact_ids"],
            part["schemes"],
            part["policy_versions"],
            part["rewards"].tolist(),
            part["groups"],
            part["sampled_finite"],
            strict=True,
        )
    ]
    if len(episodes) != len(per_sequence):
        raise ValueError(f"{len(per_sequence)} rows of mismatch for {len(episodes)} sequences")
    return [
        SequenceMismatch(
            artifact_id=artifact_id,
            scheme=scheme,
            policy_version=version,
            age=step - version,
            tokens=int(row["tokens"]),
            k1_sum=row["k1_sum"],
            k3_sum=row["k3_sum"],
            ratio_sum=row["ratio_sum"],
            ratio_sq_sum=row["ratio_sq_sum"],
            max_abs_gap=row["max_abs_gap"],
            reward=reward,
            group=group,
            left_out=int(row["masked"] + row["vetoed"]),
            rejected=int(row["rejected"]),
            sampled_finite=sampled_finite,
        )
        for (artifact_id, scheme, version, reward, group, sampled_finite), row in zip(
            episodes, per_sequence, strict=True
        )
    ]
