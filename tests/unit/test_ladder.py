"""The ladder bench end to end on a random Qwen3: another architecture than the table's."""

import json

import pytest
import torch

from apps.bench import ladder_rows
from apps.bench.ladder import main
from apps.bench.ladder_data import split
from forge_ptq.config.calibration import SmoothingConfig
from forge_ptq.rollouts_file import read_rollouts
from tests.models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ladder")
    model = tiny_model("qwen3")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 8 if parameter.dim() == 2 and parameter.shape[0] == 64 else 1
    model.save_pretrained(path / "model")
    generator = torch.Generator().manual_seed(0)
    with (path / "rollouts.jsonl").open("w") as lines:
        for index in range(14):
            ids = torch.randint(0, 64, (12 + index,), generator=generator).tolist()
            record = {"prompt_ids": ids[:5], "token_ids": ids[5:], "reward": 0.0}
            lines.write(json.dumps(record) + "\n")
            if index % 5 == 0:  # the same prompt again must not leak into another part
                lines.write(json.dumps({**record, "token_ids": ids[7:]}) + "\n")
    return path


def test_parts_are_disjoint_by_prompt(folder):
    rollouts = read_rollouts(folder / "rollouts.jsonl", vocab_size=64, max_tokens=64)
    parts = split(rollouts, 7, 3, 4)
    assert [len(part) for part in parts] == [7, 3, 4]
    groups = [rollout.group for part in parts for rollout in part]
    assert len(set(groups)) == 14
    with pytest.raises(ValueError, match="14 prompts, 15 needed"):
        split(rollouts, 7, 4, 4)


def test_rows_are_measured_once_and_kept(folder, capsys):
    out = folder / "out.json"
    arguments = ["--model", str(folder / "model"), "--data", str(folder / "rollouts.jsonl")]
    arguments += ["--out", str(out), "--calibrate", "7", "--plan", "3", "--held-out", "4"]
    wanted = [
        "dynamic",
        "static mse",
        "smooth 0.8 unrounded: static, down bf16",
        "smooth per layer: dynamic",
        "smooth 0.8: static, 3 down bf16",
        "smooth 0.8 and down per layer: static, 9 down bf16",
        "smooth 0.8: static, 3 down bf16, position 0 left out",
        "plan 3 %",
    ]
    assert set(wanted) <= set(ladder_rows.ROWS)
    main([*arguments, "--only", "^dynamic$"])
    pattern = "|".join(f"^{name.replace('.', '[.]')}$" for name in wanted)
    main([*arguments, "--only", pattern])
    assert capsys.readouterr().out.count("dynamic ") == 2
    record = json.loads(out.read_text())
    assert set(record["rows"]) == set(wanted)
    assert record["settings"]["data"] == "rollouts.jsonl"
    for row in record["rows"].values():
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert row["ci95"][0] <= row["rise"] <= row["ci95"][1]
        assert row["kl"] >= 0
    # A plan depends on more options than the other rows: only plans that are asked for and were
    # found under others are found again.
    asked = [*arguments, "--margin", "0.8", "--only"]
    main([*asked, "^dynamic$"])
    assert json.loads(out.read_text())["rows"] == record["rows"]
    main([*asked, pattern])
    main([*asked, pattern])
    assert [line[:8] for line in capsys.readouterr().out.splitlines()] == ["plan 3 %"]
    again = json.loads(out.read_text())["rows"]
    assert {n for n in again if again[n] != record["rows"][n]} == {"plan 3 %"}
    assert again["plan 3 %"]["plan_settings"]["margin"] == 0.8
    plan = record["rows"]["plan 3 %"]
    assert plan["plan_settings"]["margin"] == 0.9
    assert plan["reached"]
    assert plan["plan_rise"] <= 0.027
    assert record["rows"]["dynamic"]["shares"]["int8_dynamic"] == pytest.approx(1)


def test_plans_are_found_under_the_products_smoothing(folder, monkeypatch):
    seen: list[tuple[float | None, bool]] = []
    whole = ladder_rows.Ladder.smooth

    def smooth(self, alpha, *, down=False):
        seen.append((alpha, down))
        return whole(self, alpha, down=down)

    monkeypatch.setattr(ladder_rows.Ladder, "smooth", smooth)
    arguments = ["--model", str(folder / "model"), "--data", str(folder / "rollouts.jsonl")]
    arguments += ["--out", str(folder / "plan.json"), "--only", "^plan 3 %$"]
    main([*arguments, "--calibrate", "7", "--plan", "3", "--held-out", "4"])
    product = SmoothingConfig()
    assert seen == [(product.alpha, product.down_proj)]
