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

UPDATING = os.environ.get("UPDATE_FAULT_MATRIX") == "1"
"""Cells are written, not compared."""

REPO = Path(__file__).resolve().parents[2]

_LOGIC = "tests/integration/test_publish_logic.py"
_ANY_PHASE = "any_phase_that_fails_or_hangs_keeps_what_serves"
_SLOTS = "tests/integration/test_engine_slots.py"
_CALIBRATION = "tests/fault/test_calibration_faults.py"

OTHERS = tuple(
    Cell(phase, fault, outcome, f"{file}::test_{name}")
    for phase, fault, outcome, file, name in (
        (
            "stage",
            "out of memory",
            "kept",
            "tests/fault/test_engine_memory.py",
            "an_artifact_that_does_not_fit_leaves_everything_as_it_was",
        ),
        *(
            (phase, "fails or hangs", "kept", _LOGIC, _ANY_PHASE)
            for phase in ("quantize", "stage", "probe")
        ),
        (
            "calibrate",
            "fails or hangs",
            "bf16",
            _LOGIC,
            "a_calibration_that_misses_its_quorum_is_served_in_bf16",
        ),
        (
            "commit",
            "fails or hangs",
            "kept",
            _LOGIC,
            "a_pointer_that_may_have_moved_names_a_stored_artifact",
        ),
        ("flip", "fails or hangs", "kept", _LOGIC, "no_replica_flips_and_the_pointer_moves_back"),
        ("any", "two publishes at once", "they take turns", _LOGIC, "publishes_take_turns"),
        (
            "any",
            "publish of a version older than what serves",
            "nothing changes",
            _LOGIC,
            "older_versions_and_closed_publishers_do_nothing",
        ),
        (
            "calibrate",
            "quantizer stopped",
            "serves",
            _CALIBRATION,
            "a_replica_that_hangs_is_replaced",
        ),
        ("calibrate", "quantizer measures NaN", "serves", _CALIBRATION, "a_replica_that_goes_mad"),
        ("calibrate", "merger stopped", "bf16", _CALIBRATION, "a_merger_that_hangs_is_replaced"),
        (
            "stage",
            "request without end in the idle slot",
            "serves",
            _SLOTS,
            "draining_sequences_move_to_the_live_slot_past_the_deadline",
        ),
    )
)


def record(phase: str, fault: str, outcome: str, file: str) -> None:
    """One cell as a test of this file saw it."""
    test = os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split("[")[0].split(" ")[0]
    cell = Cell(phase, fault, outcome, f"{Path(file).resolve().relative_to(REPO)}::{test}")
    cells = read()
    if UPDATING:
        kept = {(c.phase, c.fault): c for c in (*cells, *OTHERS, cell)}
        lines = ",\n".join(json.dumps(list(kept[key])) for key in sorted(kept))
        FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        return
    assert cell in cells, f"{cell} is not in {FILE.name}: UPDATE_FAULT_MATRIX=1 writes it"
