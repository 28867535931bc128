"""The fault matrix: what happens when something breaks at some point, as the tests saw it.

    record("probe", "generator killed", "kept", __file__)

compares with docs/results/fault_matrix.json, and writes there instead where the environment says
UPDATE_FAULT_MATRIX=1. Cells of tests that others look after are listed in OTHERS. The README's
table is made from the file: `python -m apps.bench.fault_matrix`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from apps.bench.fault_matrix import FILE, Cell, read

REPO = Path(__file__).resolve().parents[2]

_LOGIC = "tests/integration/test_publish_logic.py"
_SCARCE = "tests/integration/test_engine_scarce.py"

OTHERS = (
    *(
        Cell(phase, "fails or hangs", "kept", f"{_LOGIC}::{name}")
        for phase, name in (
            ("quantize", "test_any_phase_that_fails_or_hangs_keeps_what_serves"),
            ("stage", "test_any_phase_that_fails_or_hangs_keeps_what_serves"),
            ("probe", "test_any_phase_that_fails_or_hangs_keeps_what_serves"),
        )
    ),
    Cell(
        "calibrate", "fails or hangs", "bf16",
        f"{_LOGIC}::test_a_calibration_that_misses_its_quorum_is_served_in_bf16",
    ),
    Cell(
        "commit", "fails or hangs", "kept",
        f"{_LOGIC}::test_no_replica_flips_and_the_pointer_moves_back",
    ),
    Cell("any", "two publishes at once", "they take turns", f"{_LOGIC}::test_publishes_take_turns"),
    Cell(
        "any", "a version older than what serves", "kept",
        f"{_LOGIC}::test_older_versions_and_closed_publishers_do_nothing",
    ),
    Cell(
        "calibrate", "quantizer stops or sends NaN", "serves",
        "tests/fault/test_calibration_faults.py::test_a_replica_that_goes_mad",
    ),
)  # fmt: skip


def record(phase: str, fault: str, outcome: str, file: str) -> None:
    """One cell as a test of this file saw it."""
    test = os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split("[")[0].split(" ")[0]
    cell = Cell(phase, fault, outcome, f"{Path(file).resolve().relative_to(REPO)}::{test}")
    cells = read()
    if os.environ.get("UPDATE_FAULT_MATRIX") == "1":
        kept = {(c.phase, c.fault): c for c in (*cells, *OTHERS, cell)}
        lines = ",\n".join(json.dumps(list(kept[key])) for key in sorted(kept))
        FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        return
    assert cell in cells, f"{cell} is not in {FILE.name}: UPDATE_FAULT_MATRIX=1 writes it"
