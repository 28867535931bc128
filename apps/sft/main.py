"""Makes the starting policy: a tiny Qwen3 that imitates worked solutions of chain_sum.

Usage: python -m apps.sft.main --config configs/sft_tiny_cpu.yaml [key.path=value ...]

    make a policy with random weights and its tokenizer
    repeat: questions -> worked solutions -> cross-entropy on the solution's tokens
    write a Hugging Face checkpoint folder, at once and with a marker of what it was made from

A second run with the same configuration finds the folder and ends at once.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_ptq.config import ConfigError, from_mapping, load_mapping
from forge_ptq.models import checkpoint, tiny

from .config import SFTConfig

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
"""Raise it when the code here changes what comes out; cached policies are then made anew."""

LOG_EVERY = 25


def load(path: str, overrides: list[str]) -> SFTConfig:
    """The configuration. ConfigError lists everything wrong with it."""
    problems: list[tuple[str, str]] = []
    config = from_mapping(SFTConfig, load_mapping(path, overrides, problems), problems=problems)
    if problems:
        raise ConfigError(problems, source=path)
    return config


def fingerprint(config: SFTConfig) -> str:
    """What the policy depends on: everything but where it goes and how many threads compute it."""
    made_from = {k: v for k, v in config.to_dict().items() if k not in {"output", "threads"}}
    return checkpoint.fingerprint({**made_from, "format": FORMAT})


def cross_entropy(logits: Tensor, response: Tensor, padding_mask: Tensor) -> Tensor:
    """Mean negative log-probability of the unmasked tokens: [B, R, V], [B, R], [B, R] -> scalar."""
    from forge_ptq.loss import token_logprobs

    mask = padding_mask.float()
    return -(token_logprobs(logits, response) * mask).sum() / mask.sum().clamp(min=1)


def collate(
    pairs: list[tuple[list[int], list[int]]], pad: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(prompt ids, response ids) pairs to the trainer's inputs and targets."""
    import torch

    req = max(len(prompt) for prompt, _ in pairs)
    res = max(len(response) for _, response in pairs)
    tokens = torch.full((len(pairs), req + res), pad)
    for row, (prompt, response) in zip(tokens, pairs, strict=True):
        row[req - len(prompt) : req] = torch.tensor(prompt)
        row[req : req + len(response)] = torch.tensor(response)
    response_lens = torch.tensor([[len(response)] for _, response in pairs])
    inputs = {"tokens": tokens, "prompt_lens": torch.tensor([len(p) for p, _ in pairs])}
    return inputs, {
        "response": tokens[:, req:],
        "padding_mask": torch.arange(res).unsqueeze(0) < response_lens,
    }


def train(config: SFTConfig, assets: Path) -> Any:
    """Trains a policy from scratch; returns its TrainEngine. Progress goes to the console."""
    import torch

    from apps.grpo_ptq.questions import QuestionSet
    from forge_ptq.config import CheckpointConfig, ModelConfig, TrainerConfig, TrainingConfig
    from forge_ptq.training.engine import TrainEngine

    from .demonstrations import solve

    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    tokenizer = tiny.build_tokenizer()
    engine = TrainEngine(
        TrainerConfig(
            model=ModelConfig(name="qwen3", hf_assets_path=str(assets)),
            optimizer=config.optimizer,
            lr_scheduler=config.lr_scheduler,
            checkpoint=CheckpointConfig(enable=False),
            push_rounding="nearest",  # nothing to lose: these weights never were bf16
            training=TrainingConfig(
                local_batch_size=config.batch_size,
                seq_len=tiny.MAX_LENGTH,
                max_norm=config.max_norm,
                steps=config.steps,
                dtype="float32",
                mixed_precision_param="float32",
            ),
        ),
        cross_entropy,
        load_weights=False,
        seed=config.seed,
    )
    demos = config.demonstrations
    rng = random.Random(config.seed)
    questions = QuestionSet(
        "chain_sum", demos.task_args, config.steps * config.batch_size, demos.seed
    )
    started = time.perf_counter()
    for step in range(1, config.steps + 1):
        pairs = []
        for _ in range(config.batch_size):
            entry = next(questions)
            prompt = demos.prompt_template.replace("{question}", entry["question"])
            response = tokenizer(solve(entry, rng, demos.untagged_rate)).input_ids
            pairs.append((tokenizer(prompt).input_ids, [*response, tokenizer.eos_token_id]))
        inputs, targets = collate(pairs, tokenizer.pad_token_id)
        metrics = engine.step([inputs], [targets])
        if step % LOG_EVERY == 0 or step in {1, config.steps}:
            elapsed = time.perf_counter() - started
            left = elapsed / step * (config.steps - step)
            print(
                f"warm-up {step:4d}/{config.steps}  loss {metrics['loss']:.3f}  "
                f"{elapsed:4.0f} s, {left:3.0f} s left",
                flush=True,
            )
    return engine


def make(config: SFTConfig) -> Path:
    """The policy's folder: the one that is there, or a new one."""
    output, made_from = Path(config.output), fingerprint(config)
    if checkpoint.is_current(output, made_from):
        print(f"the starting policy is in {output} already")
        return output
    checkpoint.require_replaceable(output)
    with tempfile.TemporaryDirectory() as folder:
        assets = Path(folder)
        tiny.write_assets(assets, tiny.config_dict(**config.policy.to_dict()))
        engine = train(config, assets)
        state = engine.full_hf_state()

        def fill(target: Path) -> None:
            checkpoint.copy_assets(assets, target)
            checkpoint.save_tensors(target, state)

        info = {"fingerprint": made_from, "config": config.to_dict()}
        checkpoint.write_folder(output, fill, info)
    print(f"the starting policy is in {output}")
    return output


def main(argv: list[str] | None = None) -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description="Supervised warm-up of the tiny policy")
    parser.add_argument("--config", required=True, help="YAML file")
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    args = parser.parse_args(argv)
    try:
        config = load(args.config, args.overrides)
        make(config)
    except (ConfigError, FileExistsError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
