"""Tiny random policies and rollouts for the tests of the quantizer and of publishing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from forge_ptq.services.sampler import Rollout

VOCAB = 128


def save_policy(directory: Path, kind: str, seed: int = 0, heads: tuple[int, int] = (2, 1)) -> Path:
    """A random checkpoint in bf16: "qwen3" (untied) or "llama" (tied embeddings).

    heads: numbers of query and of key/value heads, 32 wide.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.08,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    model: Any
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=False))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True))
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def policy_state(directory: Path, step: int = 0) -> dict[str, torch.Tensor]:
    """The checkpoint's weights as a trainer would push them after a few steps: slightly moved."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(step)
    state = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.02 * min(step, 1)
        state[name] = (parameter.detach().float() * (1 + noise)).bfloat16()
    return state


def random_rollouts(count: int, length: int = 24, seed: int = 0) -> list[Rollout]:
    """Rollouts of random tokens, lengths about length, each its own group."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Rollout(
            torch.randint(0, VOCAB, (length + index % 5,), generator=generator).tolist(),
            response_start=length // 3,
            reward=0.0,
            policy_version=0,
            group=f"{index:032x}",
        )
        for index in range(count)
    ]
