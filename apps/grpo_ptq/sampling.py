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

    model, tokenizer: of transformers. prompts: token ids, of any lengths. No top-k, no top-p.
    """
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    width = max(map(len, prompts))
    ids_BT = torch.full((len(prompts), width), pad)
    mask_BT = torch.zeros_like(ids_BT)
    for row, prompt in enumerate(prompts):
        ids_BT[row, width - len(prompt) :] = torch.tensor(prompt)
        mask_BT[row, width - len(prompt) :] = 1
    out_BT = model.generate(
        input_ids=ids_BT,
        attention_mask=mask_BT,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_tokens,
        pad_token_id=pad,
        eos_token_id=tokenizer.eos_token_id,
    )
    responses = [row[width:].tolist() for row in out_BT]
    end = tokenizer.eos_token_id
    return [r[: r.index(end) + 1] if end in r else r for r in responses]
