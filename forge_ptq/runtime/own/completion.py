"""`Completion`: one generated answer, as torchforge defines it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass
class Completion:
    """One sampled completion of a prompt. P prompt tokens, R generated tokens."""

    prompt: Any
    """The prompt as it was given: text, or a list of token ids."""
    text: str
    """Decoded response."""
    prompt_ids: torch.Tensor
    """int64 [P]."""
    token_ids: torch.Tensor
    """int64 [R]."""
    logprobs: torch.Tensor | None = None
    """fp32 [R]: log-probability of each generated token under the sampled distribution."""
    stop_reason: str | None = None
    """Why generation ended: stop, length, ..."""
    generator_version: int | None = None
    """Policy version that produced all of the tokens."""
    metadata: dict[str, Any] | None = None
    """Anything else, e.g. artifact_id and scheme."""
