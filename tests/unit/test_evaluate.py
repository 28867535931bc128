"""The evaluation of a trained policy: against a slow loop of argmax without batches or caches."""

import json
import statistics
from pathlib import Path

import pytest
import torch
import yaml

from apps.grpo_ptq.evaluate import evaluate, main, weights_of
from apps.grpo_ptq.questions import QuestionSet, prompt_of
from apps.grpo_ptq.rewards import Scorer
from apps.grpo_ptq.sampling import respond
from forge_ptq.config import RunConfig, load_config
from tests.loop import make_policy

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = 24


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A random policy whose logits are far apart: at a low temperature it has no second choice."""
    from transformers import AutoModelForCausalLM

    folder = make_policy(tmp_path_factory.mktemp("policy") / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(100)
    model.save_pretrained(folder)
    return folder


def settings(weights: Path, *more: str) -> RunConfig:
    """Nearly greedy, and a reward that a random policy can earn: a number in the text."""
    base = ("loss.temperature=0.01", "reward.format_reward=1.0", "reward.extract=last_number")
    return load_config(ROOT / "configs" / "tiny_cpu.yaml", [f"model={weights}", *base, *more])


def slowly(cfg: RunConfig, weights: Path, seed: int) -> list[float]:
    """Reward of the likeliest response to every question."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights)
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    source = QuestionSet(cfg.dataset.task, dict(cfg.dataset.task_args), cfg.dataset.size, seed)
    score = Scorer(cfg.reward.task, extract=cfg.reward.extract, format_reward=1.0)
    rewards: list[float] = []
    while len(rewards) < QUESTIONS:
        entry = next(source)
        ids = tokenizer(prompt_of(entry["question"], tokenizer, cfg.dataset)).input_ids
        if len(ids) > cfg.max_req_tokens:
            continue
        start = len(ids)
        while len(ids) - start < cfg.max_res_tokens:
            with torch.no_grad():
                ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
            if ids[-1] == tokenizer.eos_token_id:
                break
        text = str(tokenizer.decode(ids[start:], skip_special_tokens=True))
        rewards.append(score(text, entry).reward)
    return rewards


@pytest.mark.parametrize("batch", [5, 256])
def test_reward_is_that_of_the_responses_one_by_one(weights, batch):
    # The shortest prompts only: others are passed over.
    cfg = settings(weights, "max_req_tokens=14", "max_res_tokens=12")
    rewards = slowly(cfg, weights, seed=7)
    assert 0.0 < statistics.mean(rewards) < 2.0, "a mean that tells something"
    found = evaluate(cfg, weights, QUESTIONS, 2, seed=7, batch=batch)
    assert found["reward"] == pytest.approx(statistics.mean(rewards))
    error = statistics.stdev(rewards) / QUESTIONS**0.5
    assert found["standard_error"] == pytest.approx(error), "both responses are one cluster"


def test_command_writes_its_result_into_the_run(weights, tmp_path, capsys):
    cfg = settings(weights, "max_res_tokens=4")
    run = tmp_path / "run"
    (run / cfg.trainer.checkpoint.folder).mkdir(parents=True)
    (run / cfg.trainer.checkpoint.folder / "hf").symlink_to(weights)
    saved = {"model": str(weights), "max_res_tokens": 4}
    whole = yaml.safe_load((ROOT / "configs" / "tiny_cpu.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**whole, **saved}))
    arguments = [str(run), "--questions", "3", "--responses", "2", "--threads", "1"]
    assert main(arguments) == 0
    written = json.loads((run / "evaluation.json").read_text())
    assert written == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (written["questions"], written["responses"], written["seed"]) == (3, 2, 1000)


def test_a_run_without_trained_weights_says_how_to_get_them(weights, tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match="last_save_in_hf"):
        weights_of(settings(weights), tmp_path)
    assert main([str(tmp_path)]) == 2
    assert "config.yaml" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--questions", "0"])


@pytest.mark.parametrize(("longest", "fitting"), [(2, "0 have"), (14, "[1-9] have")])
def test_too_few_questions_are_an_error_not_a_hang(weights, longest, fitting):
    """Nor are some asked twice: that would count as evidence."""
    cfg = settings(weights, f"max_req_tokens={longest}", "dataset.size=8")
    with pytest.raises(ValueError, match=rf"got 9; of dataset.size = 8 questions {fitting}"):
        evaluate(cfg, weights, 9, 1, seed=0, batch=1)


def test_of_the_generation_config_only_the_end_tokens_count(weights):
    """The likeliest tokens one after the other, whatever the checkpoint recommends."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights)
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    prompt = [5, 6, 7]
    ids = list(prompt)
    for _ in range(8):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    plain = ids[len(prompt) :]
    model.generation_config.repetition_penalty = 50.0
    (found,) = respond(model, tokenizer, [prompt], 8, temperature=0.01)
    assert found == plain
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, plain[3]]
    (found,) = respond(model, tokenizer, [prompt], 8, temperature=0.01)
    assert found == plain[: plain.index(plain[3]) + 1]
