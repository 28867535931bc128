"""What the bench of kills takes for broken."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.bench.kills import check_run
from apps.bench.session import SessionError
from forge_ptq import guard_state
from forge_ptq.guard_state import GuardStateError
from forge_ptq.training import checkpoints
from tests.unit.test_guard_state import make


def run_folder(folder: Path, value: float = 1.0, **changes: Any) -> Path:
    """What a run of three steps leaves."""
    summary = {
        "history": [{"step": step} for step in (1, 2, 3)],
        "publishes": [{"version": version} for version in (1, 2, 3)],
        "serving": {"committed": "a", "live": ["a"]},
        **changes,
    }
    folder.mkdir(exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary))
    saved = folder / "checkpoint"
    checkpoints.save(saved, 2, {"model": {"w": torch.tensor([value, 2.0])}}, {}, keep=2)
    guard_state.save(saved, make(2))
    return folder


def test_a_sound_one_passes(tmp_path):
    assert check_run(tmp_path / "none") == {}
    assert len(check_run(run_folder(tmp_path / "run"), steps=3)["history"]) == 3


@pytest.mark.parametrize(
    ("changes", "steps", "match"),
    [
        ({"history": [{"step": 1}, {"step": 3}]}, None, r"history \[1, 3\]"),
        ({"history": [{"step": 1}, {"step": 2}, {"step": 2}]}, None, r"history \[1, 2, 2\]"),
        ({}, 4, "3 steps, expected 4"),
        ({"publishes": [{"version": 2}, {"version": 1}]}, None, r"publishes \[2, 1\]"),
        ({"serving": {"committed": "a", "live": ["a", "b"]}}, None, "serving"),
        ({"serving": {"error": "no answer"}}, 3, "not known"),
        ({"value": math.nan}, None, "step 2 holds NaN"),
    ],
)
def test_what_is_broken_is_told(tmp_path, changes, steps, match):
    with pytest.raises(SessionError, match=match):
        check_run(run_folder(tmp_path / "run", **changes), steps)


def test_a_guard_state_that_cannot_be_read(tmp_path):
    folder = run_folder(tmp_path / "run")
    (folder / "checkpoint" / "guard-00000002-0001" / guard_state.STATE).write_text("{}")
    with pytest.raises(GuardStateError, match="guard-00000002-0001"):
        check_run(folder)
