"""Rollouts of a checkpoint, as the JSON lines that `forge-ptq quantize --data` reads.

Usage: python -m apps.bench.rollouts --model models/smollm2_135m --out rollouts.jsonl

Questions of several reasoning-gym tasks in the model's chat template, each answered once (or
--responses times) by the model itself at temperature 1 in full precision. One object per line:
prompt_ids, token_ids (of the response, its end token included), reward (the task's own score),
prompt (text).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from apps.grpo_ptq.questions import QuestionSet
from apps.grpo_ptq.rewards import Scorer
from apps.grpo_ptq.sampling import respond

TASKS = (
    "chain_sum",
    "leg_counting",
    "basic_arithmetic",
    "gsm_symbolic",
    "number_sequence",
    "letter_counting",
    "simple_equations",
    "word_sorting",
)
"""Short questions in different words and formats."""


def ask(tokenizer: Any, count: int, seed: int, max_prompt: int) -> list[dict[str, Any]]:
    """`count` distinct questions, an equal share per task: {task, entry, prompt, prompt_ids}."""
    questions: list[dict[str, Any]] = []
    seen: set[str] = set()
    sets = [QuestionSet(task, {}, 10_000, seed) for task in TASKS]
    while len(questions) < count:
        source = sets[len(questions) % len(sets)]
        entry = next(source)
        if source.epoch > 1:
            raise ValueError(f"{source.task}: no question fits into {max_prompt} tokens")
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": entry["question"]}],
            add_generation_prompt=True,
            return_dict=False,
        )
        if len(ids) > max_prompt or entry["question"] in seen:
            continue
        seen.add(entry["question"])
        question = {"task": source.task, "entry": entry, "prompt": entry["question"]}
        questions.append({**question, "prompt_ids": list(ids)})
    return questions


def main() -> None:
    """Sample and write."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", required=True, help="local bf16 HF checkpoint")
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--count", type=int, default=96)
    options.add_argument("--responses", type=int, default=1, help="per question")
    options.add_argument("--batch", type=int, default=48)
    options.add_argument("--max-prompt", type=int, default=256, help="tokens")
    options.add_argument("--max-tokens", type=int, default=128, help="of a response")
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    torch.manual_seed(arguments.seed)
    distinct = ask(tokenizer, arguments.count, arguments.seed, arguments.max_prompt)
    questions = [question for question in distinct for _ in range(arguments.responses)]
    scorers = {task: Scorer(task, extract="tag_or_last_number") for task in TASKS}
    partial = arguments.out.with_suffix(".partial")
    with partial.open("w") as file:
        for start in range(0, len(questions), arguments.batch):
            batch = questions[start : start + arguments.batch]
            prompts = [question["prompt_ids"] for question in batch]
            for question, ids in zip(
                batch, respond(model, tokenizer, prompts, arguments.max_tokens), strict=True
            ):
                text = str(tokenizer.decode(ids, skip_special_tokens=True))
                score = scorers[question["task"]](text, question["entry"])
                line = {
                    "prompt_ids": question["prompt_ids"],
                    "token_ids": ids,
                    "reward": score.reward,
                    "prompt": question["prompt"],
                }
                file.write(json.dumps(line) + "\n")
            print(f"{start + len(batch)} of {len(questions)} rollouts", flush=True)
    partial.rename(arguments.out)


if __name__ == "__main__":
    main()
