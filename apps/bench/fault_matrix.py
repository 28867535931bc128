"""Prints the README's table of faults from docs/results/fault_matrix.json, which the tests write.

UPDATE_FAULT_MATRIX=1 python -m pytest tests/fault
python -m apps.bench.fault_matrix
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).resolve().parents[2] / "docs" / "results" / "fault_matrix.json"
BEGIN, END = "<!-- fault matrix -->", "<!-- end of the fault matrix -->"

PHASES = ("push", "calibrate", "quantize", "stage", "probe", "commit", "flip", "served")
"""Of a publish: until the store's pointer moves, from then until the flip, and after it."""


class Cell(NamedTuple):
    """What came of a fault in a phase, and the test that saw it ("FILE::FUNCTION")."""

    phase: str
    fault: str
    outcome: str
    test: str


def read() -> list[Cell]:
    """All cells on record."""
    return [Cell(*row) for row in json.loads(FILE.read_text("utf-8"))] if FILE.exists() else []


def markdown() -> str:
    """Two tables: faults of a publish by phase, and all the others."""
    cells = read()
    by_phase = [cell for cell in cells if cell.phase in PHASES]
    faults = sorted({cell.fault for cell in by_phase})
    lines = [f"| | {' | '.join(PHASES)} |", "|---" * (len(PHASES) + 1) + "|"]
    for fault in faults:
        found = {cell.phase: cell.outcome for cell in by_phase if cell.fault == fault}
        lines.append(f"| {fault} | {' | '.join(found.get(phase, '') for phase in PHASES)} |")
    lines += ["", "| otherwise | |", "|---|---|"]
    lines += [f"| {c.fault} | {c.outcome} |" for c in cells if c.phase not in PHASES]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
