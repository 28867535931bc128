"""A wall clock that jumps (NTP, suspend, an operator) decides nothing: only monotonic clocks do."""

import ast
import asyncio
import time
from pathlib import Path

import pytest

from forge_ptq import runtime
from forge_ptq.services.coordinator import Member, Terms
from forge_ptq.services.round import Item
from tests.fault.clock_actors import JumpyCoordinator
from tests.fault.matrix import record

ROOT = Path(__file__).resolve().parents[2]
WALL = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime"}
ALLOWED = {("forge_ptq/runtime/own/metrics.py", "time")}
"""The time stamp that a metric carries; nothing reads it but whoever looks at the metric."""


def wall_clock_reads(path: Path) -> set[str]:
    """Names of the wall clock functions of `time` and `datetime` that a module uses."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            found |= {alias.name for alias in node.names} & WALL
        if (
            isinstance(node, ast.Attribute)
            and node.attr in WALL
            and isinstance(node.value, ast.Name)
            and node.value.id in ("time", "datetime", "date")
        ):
            found.add(node.attr)
    return found


def test_no_module_asks_the_wall_clock():
    found = {
        (str(path.relative_to(ROOT)), name)
        for folder in ("forge_ptq", "apps/grpo_ptq")
        for path in (ROOT / folder).rglob("*.py")
        for name in wall_clock_reads(path)
    }
    assert found == ALLOWED


def test_the_search_finds_what_it_looks_for(tmp_path):
    module = tmp_path / "m.py"
    module.write_text(
        "import time\nfrom datetime import datetime\nx = time.time\nDT = datetime.now"
    )
    assert wall_clock_reads(module) == {"time", "now"}


async def test_a_round_under_a_clock_that_jumps_by_days():
    """The living replica keeps its share though the clock jumps; the silent one loses its own
    after a heartbeat, not sooner and not days later."""
    await runtime.init_provisioner()
    try:
        coordinator = await JumpyCoordinator.options(mesh_name="coordinator").as_actor()
        heartbeat_s = 0.6
        await coordinator.open_round.call_one("r", [Item("a"), Item("b")], Terms(heartbeat_s, 30.0))
        members = [Member(name, "host", (number,)) for number, name in enumerate(("ok", "silent"))]
        claims = [await coordinator.claim.call_one("r", member) for member in members]
        started = time.monotonic()
        while time.monotonic() - started < 2 * heartbeat_s:
            assert await coordinator.beat.call_one("r", "ok", 1)
            await asyncio.sleep(0.1)
        assert await coordinator.finish.call_one("r", "ok", claims[0].item.id, 1)
        again = await coordinator.claim.call_one("r", members[0])
        assert again.item.id == claims[1].item.id
        assert await coordinator.finish.call_one("r", "ok", again.item.id, 2)
        report = await coordinator.wait.call_one("r", 5.0)
        assert report is not None
        assert report.outcome.finished == {"a": 1, "b": 2}
        assert [before for _, before, _ in report.outcome.takeovers] == ["silent"]
        assert all(0 <= age < 60 for age in report.ages.values())
    finally:
        await runtime.shutdown()
    record("any", "wall clock jumps", "no effect", __file__)


@pytest.mark.parametrize("day", [86_400.0, -86_400.0])
def test_a_report_counts_seconds_that_passed(tmp_path, monkeypatch, day):
    from forge_ptq.observe.report import RunReport
    from forge_ptq.observe.run_dir import create_run_dir

    real = time.time
    report = RunReport(create_run_dir(tmp_path, "run", "x.yaml"))
    monkeypatch.setattr(time, "time", lambda: real() + day)
    with report.phase("train/step"):
        record_ = report.end_step(1, reward=0.0)
    assert 0 <= record_["at_s"] < 60
    assert 0 <= report.finish("completed")["wall_s"] < 60
