"""Left-padded rollouts to left-packed sequences, and logits back to response positions.

The loop pads prompts on the left and responses on the right:

    [pad pad P P P | R R pad]     request_len = 5, prompt_len = 3, response_len = 2 of 3

Fed to a model as they are, positions would count from the padding and attention would see it, so
the trainer's log-probabilities would differ from the generator's, which never saw padding. Packed:

    [P P P R R  *  * ...]         positions 0.., * is padding that causal attention keeps away

Logits at packed position prompt_len - 1 + r score response token r.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def prompt_lengths(tokens: Tensor, request_len: int, pad_id: int | None) -> Tensor:
    """[B] lengths of left-padded prompts, told by their leading run of `pad_id`.

    A fallback for callers that do not know the lengths: wrong for a prompt that begins with the pad
    token itself. `tokens` is [B, request_len + R]. At least one token per prompt is kept.
    """
    if pad_id is None:
        raise ValueError("prompt_lens is needed: the checkpoint names no padding token")
    is_pad = (tokens[:, :request_len] == pad_id).long()
    leading = is_pad.cumprod(dim=1).sum(dim=1)
    return (request_len - leading).clamp(min=1)


def pack(tokens: Tensor, prompt_lens: Tensor, request_len: int, pad_to: int = 8) -> Tensor:
    """[B, request_len + R] left-padded -> [B, L] packed, L as short as the longest prompt allows.

    L is rounded up to a multiple of `pad_to` where there is room: fewer distinct shapes.
    """
    batch, width = tokens.shape
    if prompt_lens.shape != (batch,):
        raise ValueError(f"prompt_lens: shape {tuple(prompt_lens.shape)}; expected ({batch},)")
    if bool(((prompt_lens < 1) | (prompt_lens > request_len)).any()):
        raise ValueError(f"prompt_lens: {prompt_lens.tolist()}; expected 1 to {request_len}")
    response_len = width - request_len
    longest = int(prompt_lens.max()) + response_len if batch else width
    length = min(width, -(-longest // pad_to) * pad_to)
    shift = (request_len - prompt_lens).unsqueeze(1)
    index = (torch.arange(length, device=tokens.device).unsqueeze(0) + shift).clamp(max=width - 1)
    return tokens.gather(1, index)


def response_index(prompt_lens: Tensor, response_len: int) -> Tensor:
    """[B, R] packed positions whose logits score the response tokens."""
    offsets = torch.arange(response_len, device=prompt_lens.device)
    return prompt_lens.unsqueeze(1) - 1 + offsets.unsqueeze(0)


def take(values_BLX: Tensor, index_BR: Tensor) -> Tensor:
    """[B, L, X] at [B, R] -> [B, R, X]."""
    return values_BLX.gather(1, index_BR.unsqueeze(-1).expand(-1, -1, values_BLX.shape[-1]))


def trim(tokens: Tensor, targets: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Drops the padding that every response of the batch has: nothing there is ever scored.

    `tokens` [B, request_len + R] and every [B, R] tensor of `targets` lose the columns after the
    longest response that padding_mask [B, R] shows (at least one column stays).
    """
    mask = targets["padding_mask"]
    width = mask.shape[1]
    used = mask.any(dim=0).nonzero()
    longest = int(used.max()) + 1 if len(used) else 1
    shorter = {
        k: v[:, :longest] if isinstance(v, Tensor) and v.shape == mask.shape else v
        for k, v in targets.items()
    }
    return tokens[:, : tokens.shape[1] - width + longest], shorter
