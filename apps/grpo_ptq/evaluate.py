"""How good is the policy that a run has trained?

    python -m apps.grpo_ptq.evaluate outputs/RUN [--questions 1024] [--responses 2] [--seed 1000]

The reward that a run reports is its generator's: quantized, and up to off_by_n versions behind.
This takes the exported weights (`checkpoint/hf`, written in bf16 after the last step), computes in
fp32 and lets transformers answer questions of the run's task, drawn with a seed of their own, at
the temperature of the run. Writes evaluation.json into the run's folder: the mean reward and its
standard error, clustered by question.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from forge_ptq.config import ConfigError, RunConfig, load_config
from forge_ptq.numerics.clusters import cluster_mean
from forge_ptq.observe.summary import plain, write_json

from .questions import QuestionSet, prompt_of
from .rewards import Scorer
from .sampling import respond

RESULT = "evaluation.json"
RESPONSES = 2
SEED = 1000


def weights_of(cfg: RunConfig, run: Path) -> Path:
    """Folder of the trained weights. FileNotFoundError, with what makes them, where there are
    none."""
    folder = run / cfg.trainer.checkpoint.folder / "hf"
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder}: no trained weights; a run writes them after its last step with "
            "trainer.checkpoint.enable and trainer.checkpoint.last_save_in_hf"
        )
    return folder


def ask(
    cfg: RunConfig, tokenizer: Any, questions: int, seed: int
) -> list[tuple[dict[str, Any], list[int]]]:
    """(entry, token ids of its prompt) of so many questions of a run's task. Those longer than
    max_req_tokens are passed over, as the run does. ValueError where the task has too few."""
    source = QuestionSet(cfg.dataset.task, dict(cfg.dataset.task_args), cfg.dataset.size, seed)
    asked: list[tuple[dict[str, Any], list[int]]] = []
    while len(asked) < questions:
        if source.position >= source.size:
            raise ValueError(
                f"questions: got {questions}; of dataset.size = {source.size} questions "
                f"{len(asked)} have at most max_req_tokens = {cfg.max_req_tokens} tokens"
            )
        entry = next(source)
        ids = tokenizer(prompt_of(entry["question"], tokenizer, cfg.dataset)).input_ids
        if len(ids) <= cfg.max_req_tokens:
            asked += [(entry, list(ids))]
    return asked


def evaluate(
    cfg: RunConfig, weights: Path, questions: int, responses: int, seed: int, batch: int
) -> dict[str, Any]:
    """{"reward", "standard_error", "questions", "responses", "seed"} of a checkpoint on the task of
    a run. ValueError where the task has too few questions."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights)
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    asked = ask(cfg, tokenizer, questions, seed)
    score = Scorer(**cfg.reward)
    torch.manual_seed(seed)
    jobs = [job for job in asked for _ in range(responses)]
    rewards: list[float] = []
    for start in range(0, len(jobs), batch):
        part = jobs[start : start + batch]
        prompts = [ids for _, ids in part]
        found = respond(model, tokenizer, prompts, cfg.max_res_tokens, cfg.loss.temperature)
        for (entry, _), response in zip(part, found, strict=True):
            text = str(tokenizer.decode(response, skip_special_tokens=True))
            rewards.append(score(text, entry).reward)
    result = cluster_mean(list(torch.tensor(rewards, dtype=torch.float64).split(responses)))
    return {
        "reward": result.mean,
        "standard_error": result.se,
        "questions": questions,
        "responses": responses,
        "seed": seed,
    }


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done, 2 where the run has nothing to evaluate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a run that has completed")
    parser.add_argument("--questions", type=int, default=1024)
    parser.add_argument("--responses", type=int, default=RESPONSES, help="to each question")
    parser.add_argument("--seed", type=int, default=SEED, help="of questions and sampling")
    parser.add_argument("--batch", type=int, default=256, help="responses at a time")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(argv)
    if min(options.questions, options.responses, options.batch, options.threads) < 1:
        parser.error("questions, responses, batch and threads: expected 1 or more")
    torch.set_num_threads(options.threads)
    try:
        cfg = load_config(options.run / "config.yaml")
        weights = weights_of(cfg, options.run)
        result = evaluate(
            cfg, weights, options.questions, options.responses, options.seed, options.batch
        )
    except (ConfigError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    write_json(options.run / RESULT, result)
    print(json.dumps(plain(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
