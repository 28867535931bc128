"""The live view and its plain twin."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from rich.console import Console

from forge_ptq.observe.console import (
    ConsoleView,
    percent,
    print_summary,
    publish_line,
    serving_version,
    sparkline,
)
from forge_ptq.observe.report import RunReport
from forge_ptq.observe.run_dir import create_run_dir


def run(tmp_path: Path, *, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=110, highlight=False)
    view = ConsoleView("a run", 3, 0.03, console)
    run_dir = create_run_dir(tmp_path, "r", "x.yaml")
    with RunReport(run_dir, {}, view) as report:
        report.note("starting the [generator]")
        for step in (1, 2, 3):
            with report.phase("train/step"):
                report.add_rollout(tokens=10)
            report.end_step(step, step / 10, {"loss": math.nan if step == 1 else 0.25})
        report.add_publish(
            {
                "version": 2, "outcome": "accepted", "perplexity_rise": 0.0123, "calibrated": True,
                "calibration_reason": "first", "calibration_tokens": 480, "calibrate_s": 2.5,
                "contributors": ("a:1", "b:2"), "dropped": ("c:3: NaN",), "predicted_rise": 0.02,
                "flop_share": {"int8_static": 0.75, "int8_dynamic": 0.2, "bf16": 0.05},
            }
        )  # fmt: skip
        report.add_publish(
            {
                "version": 3, "outcome": "kept", "refused": True, "perplexity_rise": 5.0,
                "reason": "over the limit",
            }
        )  # fmt: skip
        report.add_publish(
            {
                "version": 4, "outcome": "demoted", "refused": True, "perplexity_rise": 0.01,
                "refused_rise": 5.0, "reason": "over the limit; then demoted: within",
            }
        )  # fmt: skip
        report.add_publish({"version": 5, "outcome": "fell_back", "reason": "no layer is left"})
    print_summary(report.summary(), str(run_dir.path), console)
    return out.getvalue()


def test_plain_lines_without_a_terminal(tmp_path: Path) -> None:
    text = run(tmp_path, terminal=False)
    assert "\x1b" not in text
    assert "starting the [generator]" in text
    assert "step 3/3  reward 0.300  loss 0.2500  30 tokens" in text
    assert "step 1/3  reward 0.100  loss -" in text
    assert "version 2: accepted, perplexity rise 1.23 %" in text
    assert (
        "version 2: calibrated (first) on 480 tokens by 2 replicas, without c:3: NaN, plan "
        "predicts 2.00 %; 75 % static 20 % dynamic 5 % bf16"
    ) in text
    assert "1 in 2.5 s; the last: 75 % static" in text
    assert "version 3: kept: over the limit" in text
    assert "over the limit" in text
    assert "1 accepted, 1 demoted, 2 refused" in text
    assert "version 4: demoted, perplexity rise 1.00 %" in text
    assert "refused at first" in text
    assert "not served        version 3: kept" in text
    assert "served in bf16    version 5: fell_back: no layer is left" in text
    assert "results" in text


def test_the_live_view_on_a_terminal(tmp_path: Path) -> None:
    text = run(tmp_path, terminal=True)
    assert "\x1b[" in text
    for part in (
        "step 3/3",
        "serving version 5",
        "1 demoted",
        "limit 3.00 %",
        "tokens/s",
        "train/step",
    ):
        assert part in text
    assert "version 3: kept" in text


def test_a_view_before_anything_happened() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    view = ConsoleView("a run", 0, None, console)
    view.start()
    view.start()
    view.stop()
    view.stop()
    assert "step 0/0" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_version_that_serves_is_what_came_last() -> None:
    assert serving_version({}) == 0
    publishes = [
        {"version": version, "verdict": verdict}
        for version, verdict in ((1, "accepted"), (2, "demoted"), (3, "fell_back"), (4, "kept"))
    ]
    summary: dict[str, Any] = {"publishes": publishes}
    assert serving_version(summary) == 3
    summary["rollbacks"] = [{"step": 4, "version_to": 1}]
    assert serving_version(summary) == 1
    publishes.append({"version": 5, "verdict": "accepted"})
    assert serving_version(summary) == 5


def test_small_helpers() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, None, math.nan, 1.0]) == "▁▁"
    assert sparkline([0, 1]) == "▁█"
    assert len(sparkline(list(range(100)))) == 40
    assert percent(None) == "-"
    assert percent(123.0) == "1.2e+04 %"
    line = publish_line({"version": 4, "verdict": "kept", "reason": "no answer", "stage_s": 1.0})
    assert line == "version 4: kept: no answer"
