"""The warm-up: what it imitates, what it leaves behind, and that it is done once."""

import random
from typing import Any

import pytest
import torch

from apps.grpo_ptq.questions import QuestionSet
from apps.grpo_ptq.rewards import Scorer
from apps.sft import main as sft
from apps.sft.demonstrations import solve
from forge_ptq.config import ConfigError
from forge_ptq.models import checkpoint

CONFIG = "configs/sft_tiny_cpu.yaml"
SMALL = ["steps=3", "batch_size=8", "threads=1", "policy.layers=1"]


@pytest.fixture
def questions():
    return QuestionSet("chain_sum", {"min_terms": 3, "max_terms": 4, "max_digits": 2}, 200, 0)


def test_demonstrations_are_right_unless_told_otherwise(questions):
    scorer, rng = Scorer("chain_sum"), random.Random(0)
    entries = [next(questions) for _ in range(200)]
    assert all(scorer(solve(e, rng, 0.0), e).reward == 1.0 for e in entries)
    right = sum(scorer(solve(e, rng, 0.2), e).reward for e in entries) / 200
    assert 0.7 < right < 0.9


def test_warm_up_leaves_a_policy_that_loads_and_is_made_once(tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    overrides = [*SMALL, f"output={tmp_path / 'policy'}"]
    sft.main(["--config", CONFIG, *overrides])
    assert "warm-up    3/3" in capsys.readouterr().out
    folder = tmp_path / "policy"
    made = checkpoint.marker(folder)
    state = dict(checkpoint.iter_tensors(folder))
    assert {t.dtype for t in state.values()} == {torch.bfloat16}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    model, report = loaded
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = torch.tensor([tokenizer("State the final answer").input_ids])
    assert model(ids).logits.shape == (1, ids.shape[1], model.config.vocab_size)

    sft.main(["--config", CONFIG, *overrides])
    assert "already" in capsys.readouterr().out
    assert checkpoint.marker(folder) == made
    sft.main(["--config", CONFIG, *overrides, "seed=1"])
    assert "warm-up" in capsys.readouterr().out
    assert checkpoint.marker(folder) != made


def test_a_loss_that_falls(tmp_path, capsys):
    sft.main(
        ["--config", CONFIG, *SMALL, "steps=26", f"output={tmp_path / 'p'}",
         "lr_scheduler.warmup_steps=2"]
    )  # fmt: skip
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warm-up")]
    losses = [float(line.split("loss")[1].split()[0]) for line in lines]
    assert losses[-1] < 0.7 * losses[0]


def test_bad_configuration_is_named(capsys):
    with pytest.raises(ConfigError, match=r"steps"):
        sft.load(CONFIG, ["step=3"])
    with pytest.raises(SystemExit, match=r"demonstrations\.untagged_rate"):
        sft.main(["--config", CONFIG, "demonstrations.untagged_rate=much"])
