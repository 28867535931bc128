"""The list of metrics is what the code records."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from forge_ptq.observe.names import BY_NAME, METRICS, markdown

ROOT = Path(__file__).resolve().parents[2]
# Calls whose names only exist at run time, by file; what they record is checked by hand below.
DYNAMIC = {"forge_ptq/runtime/own/tracer.py", "forge_ptq/services/publish_metrics.py"}


def recorded() -> Iterator[tuple[str, str, str]]:
    """(file, name or pattern, reduction) of every record_metric call."""
    files = [*ROOT.glob("forge_ptq/**/*.py"), *ROOT.glob("apps/**/*.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or len(node.args) < 3:
                continue
            called = node.func
            if getattr(called, "id", getattr(called, "attr", "")) != "record_metric":
                continue
            name, reduction = node.args[0], ast.unparse(node.args[2]).removeprefix("Reduce.")
            if isinstance(name, ast.Constant):
                pattern = re.escape(str(name.value))
            elif isinstance(name, ast.JoinedStr):
                parts = [
                    re.escape(str(p.value)) if isinstance(p, ast.Constant) else r".+"
                    for p in name.values
                ]
                pattern = "".join(parts)
            else:
                continue
            yield str(file.relative_to(ROOT)), pattern, reduction.lower()


def test_what_is_recorded_is_listed_with_the_same_reduction() -> None:
    calls = list(recorded())
    assert len(calls) > 20
    for file, pattern, reduction in calls:
        if file in DYNAMIC or file.startswith("forge_ptq/runtime/torchforge"):
            continue
        fits = [m for m in METRICS if re.fullmatch(pattern, m.name)]
        assert fits, f"{file} records {pattern}, which forge_ptq/observe/names.py does not list"
        assert any(m.reduction == reduction for m in fits), f"{file}: {pattern} as {reduction}"


def test_verdicts_are_listed() -> None:
    source = (ROOT / "forge_ptq/services/publish_metrics.py").read_text()
    found = {
        f"ptq/{name}": reduction.lower()
        for name, reduction in re.findall(r'\("([a-z0-9_/]+)", [^\n]*Reduce\.(\w+)\)', source)
    }
    listed = {m.name: m.reduction for m in METRICS if m.name.startswith("ptq/")}
    assert found == listed


def test_names_are_unique_and_documented() -> None:
    assert len(BY_NAME) == len(METRICS)
    assert all(re.fullmatch(r"[a-z0-9_]+(/[a-z0-9_]+)+(/<split>)?", m.name) for m in METRICS)
    assert all(m.meaning for m in METRICS)
    assert (ROOT / "docs" / "metrics.md").read_text() == markdown(), (
        "run: forge-ptq metrics-table > docs/metrics.md"
    )
