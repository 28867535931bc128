"""Random models of a few thousand parameters, one per architecture that matters."""

from __future__ import annotations

from typing import Any

import torch

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def tiny_model(kind: str, seed: int = 0) -> Any:
    """llama (tied), qwen3 (q_norm, untied), qwen2 (biases on q/k/v) or gemma2; fp32, eval mode.

    Norm weights and biases are random: at their initial ones and zeros, mistakes do not show.
    """
    import transformers

    name, extra = {
        "llama": ("Llama", {"tie_word_embeddings": True}),
        "qwen3": ("Qwen3", {"tie_word_embeddings": False}),
        "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
        "gemma2": ("Gemma2", {"tie_word_embeddings": True}),
    }[kind]
    shape = {k: v for k, v in SHAPE.items() if kind != "qwen2" or k != "head_dim"}
    config = getattr(transformers, f"{name}Config")(**shape, **extra)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
    return model.eval().requires_grad_(False)
