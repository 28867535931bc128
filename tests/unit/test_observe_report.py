"""Report, summary, picture, run folder."""

from __future__ import annotations

import asyncio
import json
import math
import resource
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_ptq.observe import plot
from forge_ptq.observe.phases import SAMPLE, PhaseTimes
from forge_ptq.observe.records import LIMIT
from forge_ptq.observe.report import RunReport
from forge_ptq.observe.run_dir import RunDir, create_run_dir
from forge_ptq.observe.summary import mean, plain, write_json
from forge_ptq.services.passage import Transition
from forge_ptq.services.verdict import Verdict

CONFIG = {"seed": 3, "model": "m", "ptq": {"guard": {"max_perplexity_rise": 0.03}}}
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return create_run_dir(tmp_path / "outputs", "run", "configs/x.yaml")


def saved(run_dir: RunDir) -> dict[str, Any]:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not strict JSON")

    return json.loads(run_dir.summary.read_text(), parse_constant=refuse)


def test_a_whole_run(run_dir: RunDir) -> None:
    with RunReport(run_dir, CONFIG) as report:
        for step in range(1, 31):
            with report.phase("rollout/generate"):
                report.add_rollout(tokens=100, versions=[step - 1, None])
            report.end_step(step, step / 60, {"loss": 0.5})
        report.add_publish(
            Verdict(
                10, "accepted", perplexity_rise=0.01, kl=0.01, stage_s=0.2, pause_s=0.03, bytes=9
            )
        )
        report.add_publish(Verdict(20, "kept", "over 3 %", refused=True, perplexity_rise=4.0))
        report.add_publish(Verdict(25, "fell_back", refused=True, perplexity_rise=0.1))
        told = Transition("probed", "refused", "over 3 %", {"low": 0.4, "high": math.inf}, 28)
        report.add_publish(Verdict(28, "demoted", refused=True, transitions=(told,)))
        report.add_publish(Verdict(30, "kept", "the quantizer died"))
    summary = saved(run_dir)
    assert summary["status"] == "completed"
    assert summary["steps"] == 30
    counted = ("accepted", "demoted", "refused", "failed")
    assert [summary[key] for key in counted] == [1, 1, 3, 1]
    assert summary["publishes"][3]["transitions"] == [
        {
            "from_": "probed", "to": "refused", "why": "over 3 %", "version": 28,
            "numbers": {"low": 0.4, "high": None}, "artifact_id": None,
        }
    ]  # fmt: skip
    assert summary["reward_first10"] == pytest.approx(5.5 / 60)
    assert summary["reward_last10"] == pytest.approx(25.5 / 60)
    assert summary["tokens"] == 3000
    assert summary["served_versions"] == list(range(30))
    assert summary["tokens_per_s"] > 0
    assert summary["wall_s"] >= 0
    assert summary["seed"] == 3
    assert summary["phases"]["rollout/generate"]["count"] == 30
    assert summary["packages"]["forge_ptq"]
    first = summary["publishes"][0]
    wanted = ["version", "verdict", "perplexity_rise", "kl", "stage_s", "pause_s", "bytes"]
    assert {k: first[k] for k in wanted} == {
        "version": 10, "verdict": "accepted", "perplexity_rise": 0.01, "kl": 0.01, "stage_s": 0.2,
        "pause_s": 0.03, "bytes": 9,
    }  # fmt: skip
    assert run_dir.plot.read_bytes().startswith(PNG)


def test_no_step_at_all(run_dir: RunDir) -> None:
    with pytest.raises(RuntimeError, match="boom"), RunReport(run_dir, CONFIG):
        raise RuntimeError("boom")
    summary = saved(run_dir)
    assert summary["status"] == "failed"
    assert summary["error"] == "RuntimeError: boom"
    assert summary["steps"] == 0
    assert summary["reward_first10"] is None
    assert summary["tokens_per_s"] == 0
    assert run_dir.plot.read_bytes().startswith(PNG)


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError])
def test_an_interrupted_run(run_dir: RunDir, error: type[BaseException]) -> None:
    def run() -> None:
        with RunReport(run_dir, CONFIG) as report:
            report.end_step(1, reward=0.5)
            raise error

    with pytest.raises(error):
        run()
    assert saved(run_dir)["status"] == "interrupted"
    assert saved(run_dir)["steps"] == 1


def test_numbers_that_are_none(run_dir: RunDir) -> None:
    with RunReport(run_dir, CONFIG) as report:
        report.end_step(1, reward=math.nan, metrics={"loss": math.inf})
        report.end_step(2, reward=0.5)
        report.end_step(3, reward=-math.inf)
        report.add_publish({"version": 1, "outcome": "kept", "perplexity_rise": math.nan})
        report.add_publish(
            {"version": 2, "outcome": "kept", "perplexity_rise": 1e30, "refused": True}
        )
    summary = saved(run_dir)
    assert [r["reward"] for r in summary["history"]] == [None, 0.5, None]
    assert summary["history"][0]["loss"] is None
    assert summary["reward_last10"] == 0.5
    assert (summary["refused"], summary["failed"]) == (1, 1)
    assert run_dir.plot.read_bytes().startswith(PNG)


def test_one_step(run_dir: RunDir) -> None:
    with RunReport(run_dir, CONFIG) as report:
        report.add_publish({"version": 1, "outcome": "accepted", "perplexity_rise": 0.0})
        report.end_step(1, reward=0.25)
    assert saved(run_dir)["reward_first10"] == saved(run_dir)["reward_last10"] == 0.25


def test_a_killed_run_leaves_its_last_step(run_dir: RunDir) -> None:
    report = RunReport(run_dir, CONFIG)
    report.end_step(1, reward=1.0)
    assert saved(run_dir)["status"] == "running"
    assert saved(run_dir)["steps"] == 1


def test_a_resumed_run_keeps_what_the_checkpoint_covers(run_dir: RunDir) -> None:
    first = RunReport(run_dir, CONFIG)
    for step in (1, 2, 3):
        first.add_publish({"version": step, "outcome": "accepted"})
        first.end_step(step, reward=step)
    second = RunReport(run_dir, CONFIG)
    second.restore(2)
    second.end_step(3, reward=9.0)
    second.finish("completed")
    summary = saved(run_dir)
    assert [r["reward"] for r in summary["history"]] == [1, 2, 9]
    assert [p["version"] for p in summary["publishes"]] == [1, 2]
    assert summary["resumed_from"] == 2


def test_a_resume_that_fails_in_start_up_erases_nothing(run_dir: RunDir) -> None:
    first = RunReport(run_dir, CONFIG)
    first.add_event("respawn", "policy died")
    for step in (1, 2, 3):
        first.add_publish({"version": step, "outcome": "accepted"})
        first.end_step(step, reward=step)
    second = RunReport(run_dir, CONFIG)
    second.finish("failed", "no memory")
    summary = saved(run_dir)
    assert (summary["status"], summary["steps"], summary["accepted"]) == ("failed", 3, 3)
    third = RunReport(run_dir, CONFIG)
    third.restore(2)
    third.end_step(3, reward=9.0)
    third.finish("completed")
    summary = saved(run_dir)
    assert [r["reward"] for r in summary["history"]] == [1, 2, 9]
    assert summary["accepted"] == 2
    assert [e["text"] for e in summary["events"]] == ["policy died"]


def test_a_run_that_starts_over_in_its_folder_has_no_step_twice(run_dir: RunDir) -> None:
    first = RunReport(run_dir, CONFIG)
    for step in (1, 2):
        first.add_publish({"version": step, "outcome": "kept", "refused": True})
        first.end_step(step, reward=0.5)
    second = RunReport(run_dir, CONFIG)  # no checkpoint: nobody calls restore
    second.add_publish({"version": 1, "outcome": "accepted"})
    second.end_step(1, reward=0.25)
    summary = second.summary()
    assert [r["reward"] for r in summary["history"]] == [0.25]
    assert (summary["accepted"], summary["refused"]) == (1, 0)


def test_a_step_that_was_saved_and_not_recorded_has_its_record(run_dir: RunDir) -> None:
    first = RunReport(run_dir, CONFIG)
    first.end_step(1, reward=0.25)
    second = RunReport(run_dir, CONFIG)  # the first died after the checkpoint of step 2
    second.restore(2, reward=0.5)
    second.end_step(3, reward=0.75)
    assert [(r["step"], r["reward"]) for r in saved(run_dir)["history"]] == [
        (1, 0.25), (2, 0.5), (3, 0.75),
    ]  # fmt: skip
    third = RunReport(run_dir, CONFIG)
    third.restore(2, reward=0.5)
    assert [r["step"] for r in third.summary()["history"]] == [1, 2]


@pytest.mark.parametrize(
    "text",
    [
        '{"history": [{"step": 1, "rew',
        "",
        "[1, 2]",
        '{"history": {"step": 1}}',
        '{"history": [{"reward": 1}]}',
        '{"publishes": [{"version": "x"}]}',
        '{"events": ["a"]}',
        '{"tokens": "many"}',
        '{"served_versions": ["x"]}',
        '{"served_versions": 3}',
    ],
)
def test_a_summary_that_cannot_be_used_is_set_aside(run_dir: RunDir, text: str) -> None:
    for number in (1, 2):
        run_dir.summary.write_text(text)
        report = RunReport(run_dir, CONFIG)
        assert (run_dir.path / f"summary.json.damaged-{number}").read_text() == text
        report.restore(4)
        report.end_step(5, reward=1.0)
    summary = saved(run_dir)
    assert [r["step"] for r in summary["history"]] == [5]
    (event,) = summary["events"]
    assert event["kind"] == "summary"
    assert "summary.json.damaged-2" in event["text"]


def test_a_full_disk_is_told_of_once_and_the_summary_stays_whole(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = RunReport(run_dir, CONFIG)
    report.end_step(1, reward=1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        for step in (2, 3):
            report.end_step(step, reward=1.0)
        assert saved(run_dir)["steps"] == 1
        assert report.finish("completed")["steps"] == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(p.name for p in run_dir.path.glob("*summary*")) == ["summary.json"]
    report.end_step(4, reward=1.0)
    summary = saved(run_dir)
    assert summary["steps"] == 4
    (event,) = summary["events"]
    assert "summary.json cannot be written" in event["text"]


def test_totals_go_on_over_sessions(run_dir: RunDir) -> None:
    now = time.monotonic()
    first = RunReport(run_dir, CONFIG, started=now - 100)
    with first.phase("rollout/generate"):
        first.add_rollout(tokens=300, versions=[0, 1, 2])
    for version, made in ((1, True), (2, True), (2, False)):
        first.add_publish(
            {
                "version": version, "outcome": "accepted", "calibrated": made,
                "calibrate_s": 1.5 if made else None,
            }
        )  # fmt: skip
    first.end_step(2, reward=0.5)
    second = RunReport(run_dir, CONFIG, started=now - 20)
    second.restore(1)
    with second.phase("rollout/generate"):
        second.add_rollout(tokens=50, versions=[1])
    second.add_publish(
        {"version": 2, "outcome": "kept", "calibrate_s": 4.0, "calibration_failed": True}
    )
    second.end_step(2, reward=0.5)
    summary = second.finish("completed")
    assert summary["tokens"] == 350
    assert (summary["calibrations"], summary["calibrate_s"]) == (1, 5.5)
    assert summary["served_versions"] == [0, 1]
    assert 100 <= summary["wall_s_before"] < 110
    assert 20 <= summary["wall_s"] < 30
    assert summary["steps"] == 2
    third = RunReport(run_dir, CONFIG).summary()
    assert 120 <= third["wall_s_before"] < 140


def test_the_token_rate_leaves_the_start_up_out(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("forge_ptq.observe.report.time.monotonic", lambda: clock[0])

    def session(tokens: int, seconds: float) -> dict[str, Any]:
        report = RunReport(run_dir, CONFIG)
        with report.phase("start/policy"):
            clock[0] += 60
        with report.phase("rollout/generate"):
            clock[0] += seconds
            report.add_rollout(tokens=tokens)
        return report.finish("completed")

    assert session(100, 10)["tokens_per_s"] == 10
    assert session(300, 10)["tokens_per_s"] == 20  # 400 tokens in 20 s, both sessions together


def test_long_runs_stay_bounded(run_dir: RunDir) -> None:
    report = RunReport(run_dir, CONFIG)
    for step in range(1, 5001):
        report._records.add_step({"step": step, "reward": float(step)})
        report._records.add_publish({"version": step, "verdict": "accepted"})
        with report.phase("a"):
            pass
    summary = report.finish("completed")
    steps = [r["step"] for r in summary["history"]]
    assert steps == sorted(set(steps))
    assert steps[:10] == list(range(1, 11))
    assert steps[-LIMIT // 2 :] == list(range(5001 - LIMIT // 2, 5001))
    assert LIMIT // 2 < len(steps) <= LIMIT
    assert max(b - a for a, b in pairwise(steps)) <= 32, "the whole run is still covered"
    assert (summary["accepted"], summary["steps"]) == (5000, 5000)
    assert summary["reward_first10"] == 5.5
    assert summary["phases"]["a"]["count"] == 5000
    times = PhaseTimes()
    for seconds in [9.0] + [1.0] * 1000 + [3.0] * (SAMPLE // 2 + 1):
        times.add(seconds)
    wanted = {"count": 1258, "median_s": 3.0, "max_s": 9.0, "seconds": 1780.0}
    assert times.summary() == wanted


def test_only_the_first_end_counts(run_dir: RunDir) -> None:
    report = RunReport(run_dir, CONFIG)
    report.finish("failed", "first")
    report.finish("completed")
    assert (saved(run_dir)["status"], saved(run_dir)["error"]) == ("failed", "first")


def test_phases_add_up_over_threads_and_count_failures(run_dir: RunDir) -> None:
    report = RunReport(run_dir, CONFIG)

    def work() -> None:
        for _ in range(200):
            with report.phase("a"):
                report.add_rollout(tokens=1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(ZeroDivisionError), report.phase("b"):
        1 / 0  # noqa: B018
    summary = report.summary()
    assert summary["phases"]["a"]["count"] == 800
    assert summary["tokens"] == 800
    assert summary["phases"]["b"]["count"] == 1


def test_mean_and_plain() -> None:
    assert mean([]) is None
    assert mean([None, math.nan, True, "x"]) is None
    assert mean([1, math.inf, 3.0]) == 2
    value = {1: (math.nan, np.float32(0.5), np.int64(3)), "s": {Path("/x")}, "t": True}
    assert plain(value) == {"1": [None, 0.5, 3], "s": ["/x"], "t": True}


def test_files_hold_one_record_per_line(tmp_path: Path) -> None:
    value = {"a": 1, "b": [{"x": 1, "y": [2]}, {"x": 3}], "c": {"d": {"e": "f"}}, "g": [], "h": {}}
    write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == value
    assert '    {"x": 1, "y": [2]},\n    {"x": 3}\n' in text


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_the_picture_shows_what_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *args: Any, **kwargs: Any) -> None:
        drawn.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    plot.draw(
        {
            "history": [{"step": s, "reward": s / 4} for s in (1, 2, 3, 4)],
            "publishes": [
                {"version": 2, "verdict": "accepted", "perplexity_rise": 0.01},
                {"version": 3, "verdict": "kept", "refused": True, "perplexity_rise": 7.0},
                {"version": 5, "verdict": "demoted", "refused": True, "perplexity_rise": 0.02,
                 "refused_rise": 9.0},
                {"version": 6, "verdict": "fell_back", "refused": True, "perplexity_rise": 0.05,
                 "refused_rise": 0.045},
                {"version": 7, "verdict": "kept", "refused": True, "refused_rise": None},
                {"version": 8, "verdict": "fell_back", "refused": False, "perplexity_rise": 0.001},
                {"version": 4, "verdict": "kept", "refused": False, "perplexity_rise": None},
            ],
            "max_perplexity_rise": 0.03, "status": "failed", "steps": 4,
            "accepted": 1, "demoted": 1, "refused": 4, "failed": 1,
        },
        tmp_path / "p.png",
    )  # fmt: skip
    above, below = drawn[0].axes
    legend = above.get_legend()
    assert legend is not None
    assert {t.get_text() for t in legend.get_texts()} == {
        "each step", "mean of 5 steps", "swapped in", "refused, then demoted", "refused",
        "served in bf16", "publish failed",
    }  # fmt: skip
    at = {c.get_label(): np.asarray(c.get_offsets())[:, 0].tolist() for c in above.collections}
    assert at["served in bf16"] == [8]
    assert at["publish failed"] == [4], "as many as the title says"
    assert sorted(t.get_text() for t in below.texts) == [
        "4.5 % refused", "700 % refused (off the scale)", "900 % refused (off the scale)",
        "limit 3 %", "refused (off the scale)",
    ]  # fmt: skip
    marked: dict[str, list[tuple[int, float]]] = {"o": [], "x": []}
    for line in below.lines:
        if (marker := str(line.get_marker())) in marked:
            marked[marker] += [(int(x), float(y)) for x, y in np.asarray(line.get_xydata())]
    assert marked["o"] == [(2, 1.0), (5, 2.0)]
    assert [x for x, _ in marked["x"]] == [3, 5, 6, 7]
    assert marked["x"][2] == (6, 4.5)
    (title,) = (t.get_text() for t in drawn[0].texts if "steps" in t.get_text())
    assert "4 steps, INT8 swaps: 1 accepted, 1 demoted, 4 refused, 1 failed" in title


def test_run_folders(tmp_path: Path) -> None:
    names = {create_run_dir(tmp_path, None, "configs/tiny_cpu.yaml").name for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("tiny_cpu_") for name in names)
    named = create_run_dir(tmp_path, "mine", "x.yaml")
    assert (tmp_path / "latest").resolve() == named.path.resolve()
    assert named.logs.is_dir()
    assert create_run_dir(tmp_path, "mine", "x.yaml") == named
    assert named.checkpoint("checkpoint") == named.path / "checkpoint"
    assert named.checkpoint("/abs") == Path("/abs")
    for bad in ("", "..", "a/b", "latest"):
        with pytest.raises(ValueError, match="run_name"):
            create_run_dir(tmp_path, bad, "x.yaml")


def test_a_real_folder_called_latest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    create_run_dir(tmp_path, "a", "x.yaml")
    assert not (tmp_path / "latest").is_symlink()


def test_rollbacks_are_kept_and_told(run_dir: RunDir) -> None:

    with RunReport(run_dir, CONFIG) as report:
        report.end_step(1, 0.5)
        report.add_rollback(1, {"version_from": 1, "version_to": 0, "reason": "mismatch"})
    summary = report.summary()
    assert [(r["step"], r["version_to"]) for r in summary["rollbacks"]] == [(1, 0)]
    assert summary["events"][-1]["kind"] == "rollback"
    again = RunReport(run_dir, CONFIG)
    again.restore(0)
    assert again.summary()["rollbacks"] == []
