"""Comparison of arms: numbers against hand-made ones, runs that are reused, failures in sight."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest

from apps.grpo_ptq import compare as compare_module
from apps.grpo_ptq.compare import Comparison, load, main
from apps.grpo_ptq.compare_numbers import CURVES, Run, compare, estimate, record_of
from apps.grpo_ptq.compare_plot import band, colors_of
from apps.grpo_ptq.compare_table import markdown, verdict
from forge_ptq.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
base: {base}
output_dir: unused
seeds: [0, 1, 2]
reference: bf16
default: int8
overrides: ["debug.inject=[]", trainer.training.steps=4]
questions: 0
arms:
  bf16: {{label: full precision, overrides: [ptq.enabled=false]}}
  int8: {{label: INT8, overrides: []}}
  stress: {{label: coarse, group: stress, overrides: [loss.rollout_correction=none]}}
"""
REWARDS = {"bf16": [0.5, 0.8, 0.6], "int8": [0.49, 0.81, 0.59]}


def summary(reward: float, *, steps: int = 4, status: str = "completed") -> dict[str, Any]:
    history = [
        {"step": s, "reward": reward + s / 100, "mismatch_k3": reward * s / 1000, "ess": 1 - s / 50,
         "masked_fraction": 0.01, "vetoed_fraction": 0.02, "rejected_fraction": 0.0,
         "policy_age_mean": s / 10}
        for s in range(1, steps + 1)
    ]  # fmt: skip
    publishes = [
        {"version": 1, "verdict": "accepted", "perplexity_rise": 0.01},
        {"version": 2, "verdict": "demoted", "perplexity_rise": 0.02},
        {"version": 3, "verdict": "kept", "perplexity_rise": 9.0},
        {"version": 4, "verdict": "fell_back", "perplexity_rise": None},
    ]
    return {
        "status": status, "error": None if status == "completed" else "the trainer died",
        "reward_last10": reward, "history": history, "publishes": publishes, "refused": 1,
        "tokens_per_s": 100 * reward,
    }  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "compare.yaml"
    path.write_text(CONFIG.format(base=ROOT / "configs" / "tiny_cpu.yaml"))
    return path


@pytest.fixture
def made(config: Path, tmp_path: Path) -> Path:
    """Runs as they lie on disk; of the third arm one has failed and none has completed."""
    folder = tmp_path / "runs"
    comparison = Comparison(load(str(config)), folder, [])
    for arm, rewards in REWARDS.items():
        for seed, reward in enumerate(rewards):
            place(comparison, arm, seed, summary(reward), 0)
    place(comparison, "stress", 1, summary(0.1, steps=2, status="failed"), 1)
    (folder / "int8-seed2.failed-1").mkdir()
    return folder


def place(comparison: Comparison, arm: str, seed: int, found: dict[str, Any], code: int) -> None:
    folder = comparison.folder(arm, seed)
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(found))
    record = {"settings": comparison.settings(arm, seed), "exit_code": code, "wall_s": 12.0}
    (folder / "compare.json").write_text(json.dumps(record))


def test_report_of_runs_on_disk(config, made, capsys):
    code = main(["--config", str(config), "--output-dir", str(made), "--report-only"])
    assert code == 1  # an arm without a completed run
    result = json.loads((made / "compare.json").read_text())
    int8 = result["arms"]["int8"]
    ratios = [a / b for a, b in zip(REWARDS["int8"], REWARDS["bf16"], strict=True)]
    assert int8["relative"]["mean"] == pytest.approx(statistics.mean(ratios))
    half = 4.302653 * statistics.stdev(ratios) / math.sqrt(3)  # t of two degrees of freedom
    assert int8["relative"]["half"] == pytest.approx(half, rel=1e-5)
    assert int8["perplexity_rise"]["mean"] == pytest.approx(0.015)  # of what served
    assert int8["left_out"]["mean"] == pytest.approx(0.03)
    assert int8["policy_age"]["mean"] == pytest.approx(0.25)
    assert int8["lowest_ess"]["mean"] == pytest.approx(1 - 4 / 50)
    kinds = ("accepted", "demoted", "kept", "fell_back", "refused")
    assert int8["outcomes"] == dict.fromkeys(kinds, 3)
    curve = int8["curves"]["reward"]
    assert [p["step"] for p in curve] == [1, 2, 3, 4]
    assert curve[1]["mean"] == pytest.approx(statistics.mean(REWARDS["int8"]) + 0.02)
    assert (int8["completed"], int8["failed"]) == (3, 1)
    stress = result["arms"]["stress"]
    assert (stress["completed"], stress["failed"], stress["reward"]["mean"]) == (0, 1, None)
    table = (made / "compare.md").read_text()
    assert "| INT8 | 3, 1 failed | 0.630 ± " in table
    assert "| coarse | 0, 1 failed | - | - |" in table
    assert "`stress`, seed 1: failed after 2 steps: the trainer died (exit code 1)" in table
    assert (made / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert table in capsys.readouterr().out


def test_a_report_of_no_runs_at_all(config, tmp_path, capsys):
    folder = tmp_path / "not" / "there"
    assert main(["--config", str(config), "--output-dir", str(folder), "--report-only"]) == 1
    assert "bf16: no completed run" in capsys.readouterr().err
    assert "| INT8 | 0 | - | - |" in (folder / "compare.md").read_text()


def test_pairs_that_are_missing_and_steps_that_taught_nothing_are_told(config, tmp_path, capsys):
    """The reference lacks one of three seeds; a run of the default arm diverged."""
    folder = tmp_path / "runs"
    comparison = Comparison(load(str(config)), folder, [])
    for seed, reward in enumerate(REWARDS["int8"]):
        found = summary(reward)
        for record in found["history"][1:] if seed == 1 else ():
            record["skipped"] = 1.0
        place(comparison, "int8", seed, found, 0)
        if seed:
            place(comparison, "bf16", seed, summary(REWARDS["bf16"][seed]), 0)
    main(["--config", str(config), "--output-dir", str(folder), "--report-only"])
    table = capsys.readouterr().out
    assert "| INT8 | 3 | 0.630 ± " in table
    row = next(line for line in table.splitlines() if line.startswith("| INT8 |"))
    assert row.split("|")[4].endswith(" % (2 seeds) ")
    assert "(2 seeds, 95 % interval " in table
    assert "`int8`, seed 1: 3 of 4 steps changed nothing" in table
    assert table.count("changed nothing") == 1


@pytest.mark.parametrize(
    ("found", "code", "late", "error"),
    [
        ({**summary(0.5), "reward_last10": None}, 0, False, "no reward in the last ten steps"),
        (summary(0.5, status="interrupted") | {"error": None}, 130, True, "not over after timeout"),
        (summary(0.5, status="interrupted") | {"error": None}, 130, False, "interrupted"),
    ],
)
def test_what_a_run_without_a_result_failed_of(found, code, late, error):
    made = {"exit_code": code, "wall_s": 3.0, "timed_out": late}
    run = record_of(found, "int8", 0, made)
    assert not run.completed
    assert run.reward is None
    assert run.line().startswith(f"failed after 4 steps: {error}")


def test_a_run_past_its_deadline_is_recorded_as_one(config, tmp_path, monkeypatch):
    cfg = load(str(config))
    cfg.timeout_s = 0.24  # rounds down
    comparison = Comparison(cfg, tmp_path, [])
    monkeypatch.setattr("apps.grpo_ptq.compare.subprocess.Popen", _sleeper(subprocess.Popen))
    assert "not over after timeout_s" in comparison.run("bf16", 0).line()


def _sleeper(popen: Any) -> Any:
    return lambda command, **options: popen(["sleep", "30"], **options)


def test_what_has_completed_is_not_run_again(config, made):
    before = {p: p.stat().st_mtime_ns for p in made.rglob("summary.json")}
    arms = ["--arms", "bf16,int8"]
    assert main(["--config", str(config), "--output-dir", str(made), *arms]) == 0
    assert {p: p.stat().st_mtime_ns for p in made.rglob("summary.json")} == before


def test_runs_of_other_settings_are_not_mixed_in(config, made, capsys):
    arguments = ["--config", str(config), "--output-dir", str(made), "loss.beta=0.5"]
    assert main(arguments) == 2
    assert "loss.beta=0.5" in capsys.readouterr().err


def test_a_run_that_fails_is_told_of_and_made_again(config, tmp_path, capsys):
    """The real command, which refuses a model that is not there."""
    arguments = ["--config", str(config), "--output-dir", str(tmp_path / "runs"),
                 "--arms", "bf16", "--seeds", "1", f"model={tmp_path / 'nothing'}"]  # fmt: skip
    cfg = load(str(config))
    comparison = Comparison(cfg, tmp_path / "runs", [f"model={tmp_path / 'nothing'}"])
    place(comparison, "bf16", 1, summary(0.1, steps=2, status="failed"), 1)
    assert main(arguments) == 1
    result = json.loads((tmp_path / "runs" / "compare.json").read_text())
    assert result["arms"]["bf16"]["failed"] == 2
    assert result["runs"][0]["error"] == "no summary (exit code 2)"
    assert "no checkpoint folder" in (tmp_path / "runs" / "bf16-seed1.log").read_text()
    captured = capsys.readouterr()
    assert "bf16, seed 1: failed after 0 steps" in captured.out
    assert "bf16: no completed run" in captured.err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("reference: bf16", "reference: fp8", "reference: got 'fp8'"),
        ("seeds: [0, 1, 2]", "seeds: [0, 0]", "seeds: got"),
        ("default: int8", "defualt: int8", "did you mean default"),
        ("ptq.enabled=false", "ptq.enbled=false", "ptq.enbled"),
        ("seeds: [0, 1, 2]", "seeds: [0, 1", "expected ',' or ']'"),
    ],
)
def test_mistakes_are_named_before_anything_runs(config, tmp_path, capsys, old, new, message):
    config.write_text(config.read_text().replace(old, new))
    assert main(["--config", str(config), "--output-dir", str(tmp_path / "runs")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_shipped_comparison_is_sound():
    cfg = load(str(ROOT / "configs" / "compare_tiny_cpu.yaml"))
    assert len(cfg.seeds) >= 5
    cfg.base = str(ROOT / cfg.base)
    groups = {name: arm.group for name, arm in cfg.arms.items()}
    colors = colors_of(groups, cfg.reference)
    for column in set(groups.values()):  # the reference is drawn in every one
        shown = {arm for arm in groups if groups[arm] == column} | {cfg.reference}
        assert len({colors[arm] for arm in shown}) == len(shown)
    comparison = Comparison(cfg, Path("unused"), [])
    assert {comparison.steps(arm) for arm in cfg.arms} == {40}
    with pytest.raises(ConfigError, match="tis_cap"):
        Comparison(cfg, Path("unused"), ["loss.tis_cap=0"]).steps("bf16")


def test_estimates_without_enough_numbers():
    none = dict.fromkeys(("mean", "half", "low", "high"))
    assert estimate([]) == {**none, "n": 0}
    one = {"mean": 2.0, "half": None, "low": 2.0, "high": 2.0, "n": 1}
    assert estimate([None, 2.0, math.nan]) == one
    assert estimate([3.0, 3.0]) == {"mean": 3.0, "half": 0.0, "low": 3.0, "high": 3.0, "n": 2}


def test_a_band_of_two_runs_is_their_range():
    assert band(estimate([2.0])) == (2.0, 2.0)
    assert band(estimate([1.0, 3.0])) == (1.0, 3.0)
    half = 4.302653 / math.sqrt(3)  # t of two degrees of freedom, standard deviation 1
    assert band(estimate([1.0, 2.0, 3.0])) == pytest.approx((2 - half, 2 + half), rel=1e-6)


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (1.00, 0.005, "the whole interval is over it"),
        (0.995, 0.02, "within the interval; the mean is over it"),
        (0.985, 0.02, "within the interval; the mean is under it"),
        (0.95, 0.01, "the whole interval is under it"),
        (0.95, None, "with one seed"),
        (None, None, "no pair of runs"),
    ],
)
def test_verdict_says_what_the_interval_allows(mean, half, text):
    result = {
        "default": "int8", "agreement": 0.99,
        "arms": {"int8": {"relative": {"mean": mean, "half": half, "n": 3}}},
    }  # fmt: skip
    assert text in verdict(result)


def test_trained_policies_are_evaluated_once_and_compared(config, tmp_path, monkeypatch, capsys):
    config.write_text(config.read_text().replace("questions: 0", "questions: 64"))
    folder = tmp_path / "runs"
    comparison = Comparison(load(str(config)), folder, [])
    for arm in ("bf16", "int8"):
        for seed in range(3):
            place(comparison, arm, seed, summary(0.5), 0)
    asked = []

    def run(command: list[str], log: int, timeout_s: float) -> int:
        asked.append(command)
        run_folder = Path(command[3])
        if run_folder.name == "int8-seed2":
            return 1
        reward = 0.8 if "bf16" in run_folder.name else 0.72
        made = {"reward": reward, "questions": 64, "responses": 2, "seed": 1000}
        if run_folder.name == "int8-seed1" and len(asked) <= 6:
            made["questions"] = 32  # by hand, with fewer
        (run_folder / "evaluation.json").write_text(json.dumps(made))
        return 0

    monkeypatch.setattr(compare_module, "_bounded", run)
    arguments = ["--config", str(config), "--output-dir", str(folder), "--arms", "bf16,int8"]
    assert main(arguments) == 1
    assert "int8, seed 2: not evaluated" in capsys.readouterr().err
    assert len(asked) == 6
    assert asked[0][-2:] == ["--questions", "64"]
    assert main(arguments) == 1
    again = [Path(command[3]).name for command in asked[6:]]
    assert again == ["int8-seed1", "int8-seed2"], (
        "the one with fewer questions, and the missing one"
    )
    result = json.loads((folder / "compare.json").read_text())
    int8 = result["arms"]["int8"]
    assert int8["evaluated"]["n"] == int8["evaluated_relative"]["n"] == 2
    assert int8["evaluated_relative"]["mean"] == pytest.approx(0.9)
    table = (folder / "compare.md").read_text()
    evaluated = "0.720 ± 0.000 (2 seeds) | 90.0 ± 0.0 % (2 seeds)"
    assert f"| INT8 | 3 | 0.500 ± 0.000 | 100.0 ± 0.0 % | {evaluated} |" in table
    assert "`int8` reached 90.0 % of the reference's reward of the trained policy" in table


def test_an_arm_that_keeps_no_policy_cannot_be_evaluated(config, capsys):
    text = config.read_text().replace("questions: 0", "questions: 64")
    config.write_text(
        text.replace(
            "label: INT8, overrides: []",
            "label: INT8, overrides: [trainer.checkpoint.enable=false]",
        )
    )
    assert main(["--config", str(config)]) == 2
    assert "arms.int8: trainer.checkpoint.enable" in capsys.readouterr().err


def test_reference_curves_are_of_single_runs_and_end_where_the_runs_do():
    long: list[float | None] = [*[0.1] * 10, *[0.3] * 10, 0.9, None, 0.7]
    runs = []
    short: list[float | None] = [0.2] * 12
    for seed, rewards in enumerate([long, short]):
        curves: dict[str, list[float | None]] = {name: [] for name in CURVES}
        curves["reward"] = rewards
        runs.append(Run("a", seed, True, "", len(rewards), 0.5, curves, {}))
    found = compare(runs, {"a": "A", "b": "B"}, "a", "a", {})
    windows = found["arms"]["a"]["windows"]
    assert [(w["first"], w["last"], w["n"]) for w in windows] == [
        (1, 10, 2),
        (11, 20, 2),
        (21, 23, 1),
    ]
    assert [w["mean"] for w in windows] == pytest.approx([0.15, 0.25, 0.8])
    assert [(w["low"], w["high"]) for w in windows[:2]] == [
        (pytest.approx(0.1), pytest.approx(0.2)), (pytest.approx(0.2), pytest.approx(0.3)),
    ]  # fmt: skip
    table = markdown({"base": "x", "agreement": 0.99, **found})
    assert "| arm | 1-10 | 11-20 | 21-23 |" in table
    assert "| A | 0.15 (0.10-0.20) | 0.25 (0.20-0.30) | 0.80 (0.80-0.80) |" in table
    assert "| B | - | - | - |" in table


def test_table_without_arms_is_still_a_table():
    empty = {"base": "x", "reference": "a", "default": "a", "arms": {}, "runs": []}
    assert "| arm |" in markdown({**empty, "agreement": 0.99})
