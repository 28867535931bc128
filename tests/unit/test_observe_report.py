"""Report, summary, picture, run folder."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from forge_ptq.observe import plot
from forge_ptq.observe.report import RunReport
from forge_ptq.observe.run_dir import RunDir, create_run_dir
from forge_ptq.observe.summary import mean, plain, write_json
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
        report.add_publish(Verdict(30, "kept", "the quantizer died"))
    summary = saved(run_dir)
    assert summary["status"] == "completed"
    assert summary["steps"] == 30
    assert (summary["accepted"], summary["refused"], summary["failed"]) == (1, 2, 1)
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
    import numpy as np

    assert mean([]) is None
    assert mean([None, math.nan, True, "x"]) is None
    assert mean([1, math.inf, 3.0]) == 2
    value = {1: (math.nan, np.float32(0.5), np.int64(3)), "s": {Path("/x")}, "t": True}
    assert plain(value) == {"1": [None, 0.5, 3], "s": ["/x"], "t": True}


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
                {"version": 4, "verdict": "kept", "refused": False, "perplexity_rise": None},
            ],
            "max_perplexity_rise": 0.03, "status": "failed",
        },
        tmp_path / "p.png",
    )  # fmt: skip
    above, below = drawn[0].axes
    legend = above.get_legend()
    assert legend is not None
    assert {t.get_text() for t in legend.get_texts()} == {
        "each step", "mean of 5 steps", "swapped in", "refused", "publish failed",
    }  # fmt: skip
    texts = " ".join(t.get_text() for t in below.texts)
    assert "700 % refused (off the scale)" in texts
    assert "limit 3 %" in texts


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
