"""Responses of a checkpoint by transformers: full precision, no engine, no services."""

from __future__ import annotations

from typing import Any

import torch


@torch.inference_mode()
def respond(
    model: Any,
    tokenizer: Any,
    prompts: list[list[int]],
    max_tokens: int,
    temperature: float = 1.0,
) -> list[list[int]]:
    """One sampled response per prompt, cut after its end token.

    model, tokenizer: of transformers. prompts: token ids, of any lengths. No top-k, no top-p, and
    of the checkpoint's generation_config nothing but its end tokens: as the generator samples.
    """
    from transformers import GenerationConfig

    configured = model.generation_config.eos_token_id
    ends = [configured] if isinstance(configured, int) else list(configured or [])
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
        ends.append(tokenizer.eos_token_id)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    width = max(map(len, prompts))
    ids_BT = torch.full((len(prompts), width), pad)
    mask_BT = torch.zeros_like(ids_BT)
    for row, prompt in enumerate(prompts):
        ids_BT[row, width - len(prompt) :] = torch.tensor(prompt)
        mask_BT[row, width - len(prompt) :] = 1
    sampling = GenerationConfig(
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_tokens,
        pad_token_id=pad,
        eos_token_id=ends or None,
    )
    own, model.generation_config = model.generation_config, sampling  # else it fills the gaps
    try:
        out_BT = model.generate(input_ids=ids_BT, attention_mask=mask_BT)
    finally:
        model.generation_config = own
    return [_until(row[width:].tolist(), ends) for row in out_BT]


def _until(ids: list[int], ends: list[int]) -> list[int]:
    """Up to the first end token, that included."""
    cut = next((i for i, token in enumerate(ids) if token in ends), len(ids) - 1)
    return ids[: cut + 1]
