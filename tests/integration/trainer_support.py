"""Policies, batches and configurations for the trainer's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from forge_ptq.config.titan import (
    CheckpointConfig,
    LRSchedulerConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainerConfig,
    TrainingConfig,
)
from forge_ptq.training.engine import TrainEngine

VOCAB = 96
REQUEST, RESPONSE = 10, 6


def save_policy(folder: Path, kind: str, **changes: Any) -> Path:
    """A small random checkpoint in fp32: "qwen3" or "llama", grouped queries, odd head count."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        **changes,
    }
    torch.manual_seed(0)
    if kind == "qwen3":
        model: Any = Qwen3ForCausalLM(Qwen3Config(**shape))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def batch(size: int = 4, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Random rollouts in the loop's layout: left-padded prompts, right-padded responses."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB, (size, REQUEST + RESPONSE), generator=generator)
    prompt_lens = torch.randint(1, REQUEST + 1, (size,), generator=generator)
    response_lens = torch.randint(1, RESPONSE + 1, (size, 1), generator=generator)
    mask = torch.arange(RESPONSE) < response_lens
    tokens[:, :REQUEST][torch.arange(REQUEST) < (REQUEST - prompt_lens).unsqueeze(1)] = 0
    tokens[:, REQUEST:][~mask] = 0
    logprobs = -3 + torch.randn(size, RESPONSE, generator=generator)
    targets = {
        "response": tokens[:, REQUEST:],
        "padding_mask": mask,
        "ref_logprobs": logprobs,
        "generator_logprobs": logprobs + 0.1,
        "advantages": torch.randn(size, 1, generator=generator),
    }
    return {"tokens": tokens, "prompt_lens": prompt_lens}, targets


def config(policy: Path, folder: Path | None = None, **training: Any) -> TrainerConfig:
    """A trainer's configuration; checkpoints go to `folder`, None turns them off."""
    qwen3 = "Qwen3" in (policy / "config.json").read_text()
    return TrainerConfig(
        model=ModelConfig(name="qwen3" if qwen3 else "llama3", hf_assets_path=str(policy)),
        optimizer=OptimizerConfig(lr=1e-2),
        lr_scheduler=LRSchedulerConfig(warmup_steps=3, decay_ratio=None),
        training=TrainingConfig(
            **{
                "local_batch_size": 8,
                "seq_len": 64,
                "steps": 10,
                "mixed_precision_param": "float32",
                **training,
            }
        ),
        parallelism=ParallelismConfig(data_parallel_shard_degree=-1),
        checkpoint=CheckpointConfig(
            enable=folder is not None, folder=str(folder or "unused"), interval=1, keep_latest_k=2
        ),
    )


def weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """A copy of the policy's weights, whole and in fp32, under HF names."""
    return {k: v.clone() for k, v in engine.full_hf_state(torch.float32).items()}
