"""The simulation of the gate: its shortcut against compare(), and outcomes that must be."""

import json
import math

import pytest
import torch

from apps.bench import decision_scores
from apps.bench.decision import main, outcomes, shares
from apps.bench.decision_draws import Draws, Scored
from forge_ptq.numerics.clusters import cluster_mean
from forge_ptq.numerics.divergence import compare
from forge_ptq.services.guard import Limits
from tests.models import tiny_model


def scored(mean: float = 0.03, spread: float = 0.5, rollouts: int = 40) -> Scored:
    generator = torch.Generator().manual_seed(0)
    kl, delta = [], []
    for number in range(rollouts):
        tokens = 1 + (7 * number) % 23
        level = mean * math.exp(spread * float(torch.randn(1, generator=generator)))
        kl.append(level * torch.rand(tokens, generator=generator) * 2)
        delta.append(kl[-1] + 0.2 * torch.randn(tokens, generator=generator))
    return Scored("made up", kl, delta)


@pytest.mark.parametrize("size", [2, 7, 32])
def test_draws_say_what_compare_says(size):
    pool = scored()
    draws = Draws(pool, trials=5, most=32, seed=1)
    for trial in range(5):
        picks = [int(pick) for pick in draws.picks_TN[trial, :size]]
        deltas = [pool.delta_GR[pick] for pick in picks]
        zeros = [torch.zeros_like(delta_R) for delta_R in deltas]
        real = compare([-delta_R for delta_R in deltas], zeros, [pool.kl_GR[p] for p in picks])
        fast = draws.divergence(trial, size, "kl")
        assert fast.log_rise.mean == pytest.approx(real.log_rise.mean)
        assert fast.log_rise.se == pytest.approx(real.log_rise.se)
        assert fast.interval(0.99) == pytest.approx(real.interval(0.99))
        assert fast.token_kl == real.token_kl
        assert fast.worst_sequence_rise == pytest.approx(real.worst_sequence_rise)
        assert (fast.tokens, fast.sequences) == (real.tokens, real.sequences)
        nll = draws.divergence(trial, size, "nll")
        assert nll.log_rise.mean == pytest.approx(real.nll_rise, abs=1e-9)
        assert nll.log_rise.se == pytest.approx(real.nll_rise_se)
        naive = draws.divergence(trial, size, "kl, by token")
        tokens = torch.cat([pool.kl_GR[pick] for pick in picks])
        assert naive.log_rise.se == pytest.approx(cluster_mean(list(tokens.split(1))).se)


def test_far_from_the_limit_one_look_is_enough_and_right():
    pool = scored()
    draws = Draws(pool, trials=50, most=128, seed=2)
    for limit, verdict in ((0.3, "accepted"), (0.003, "refused")):
        found = shares(outcomes(draws, Limits(limit, looks=3), [32, 64, 128], "kl"), 50)
        assert found[verdict] == 1.0
        assert found["rollouts"] == 32
        assert found["by point estimate"] == 0.0


def test_at_the_limit_more_is_scored_and_chance_decides():
    pool = scored()
    draws = Draws(pool, trials=200, most=128, seed=3)
    limits = Limits(pool.truth, looks=3)
    found = shares(outcomes(draws, limits, [32, 64, 128], "kl"), 200)
    assert 0.3 < found["accepted"] < 0.7
    assert found["accepted"] + found["refused"] == pytest.approx(1.0)
    assert found["by point estimate"] > 0.8
    assert found["rollouts"] > 110


def test_scores_of_damaged_candidates_and_the_tables_made_of_them(tmp_path, monkeypatch, capsys):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(0)
    for name, responses in (("rollouts", 1), ("pool", 3)):
        with (tmp_path / f"{name}.jsonl").open("w") as lines:
            for index in range(16):
                prompt = torch.randint(0, 64, (4,), generator=generator).tolist()
                for _ in range(responses):
                    ids = torch.randint(0, 64, (3 + index,), generator=generator).tolist()
                    record = {"prompt_ids": prompt, "token_ids": ids, "reward": 0.0}
                    lines.write(json.dumps(record) + "\n")
    layer = decision_scores.mlp(0, "up_proj")
    damages = {
        "good": None,
        "wider": decision_scores.Damage(layer, 1.5),
        "coarser": decision_scores.Damage(layer, four_bits=True),
        "good again": None,
    }
    candidates = {
        name: decision_scores.Candidate(decision_scores.dynamic, damage)
        for name, damage in damages.items()
    }
    monkeypatch.setattr(decision_scores, "CANDIDATES", candidates)
    common = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "rollouts.jsonl")]
    common += ["--calibrate", "5", "--plan", "2", "--pool", "8"]
    decision_scores.main([*common, "--out", str(tmp_path / "s.pt"), "--only", "wider", "good"])
    decision_scores.main([*common, "--out", str(tmp_path / "s.pt")])
    assert capsys.readouterr().out.count("%") == 4, "each is scored once"
    found = {one.name: one for one in Scored.load(tmp_path / "s.pt")}
    assert found["wider"].truth > found["good"].truth
    assert found["coarser"].truth > found["good"].truth
    assert found["good"].truth == found["good again"].truth, "the damage does not last"

    grouped = [*common, "--pool-data", str(tmp_path / "pool.jsonl"), "--only", "^good$"]
    decision_scores.main([*grouped, "--out", str(tmp_path / "g.pt")])
    files = ["--scores", str(tmp_path / "s.pt"), "--grouped", str(tmp_path / "g.pt")]
    main([*files, "--out", str(tmp_path / "out.json"), "--trials", "2"])
    text = (tmp_path / "out.json").read_text()
    assert str(tmp_path / "s.pt") not in text
    record = json.loads(text)
    assert record["prompts"]["good"]["rollouts"] == 48
    assert record["prompts"]["good"]["prompts"] == 16
    assert set(record["candidates"]) == set(candidates)
    assert record["pool"]["rollouts"] == 8
