"""Prints the README's table of faults from docs/results/fault_matrix.json, which the tests write.

UPDATE_FAULT_MATRIX=1 python -m pytest tests/fault
python -m apps.bench.fault_matrix
"""

from __future__ import annotations

import json
from collections import Counter
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
    """Two tables: faults that were tried in several phases of a publish, and all the others."""
    cells = read()
    count = Counter(cell.fault for cell in cells if cell.phase in PHASES)
    lines = [f"| | {' | '.join(PHASES)} |", "|---" * (len(PHASES) + 1) + "|"]
    for fault in sorted(fault for fault in count if count[fault] > 1):
        found = {cell.phase: cell.outcome for cell in cells if cell.fault == fault}
        lines.append(f"| {fault} | {' | '.join(found.get(phase, '') for phase in PHASES)} |")
    lines += ["", "| when | what | then |", "|---|---|---|"]
    others = (cell for cell in cells if count[cell.fault] <= 1)
    lines += [f"| {cell.phase} | {cell.fault} | {cell.outcome} |" for cell in others]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
