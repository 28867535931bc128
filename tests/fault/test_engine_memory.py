"""Staging when memory runs out, for real: a process with a limit on its address space.

The limit holds for a whole process and for good where it fails, so it is set in a child, which runs
``python -m tests.fault.test_engine_memory DIRECTORY`` and prints what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(240)

REPO = Path(__file__).resolve().parents[2]
MEBI = 2**20
MARGINS = (3, 8, 15)
"""MiB left for an artifact that takes more than 20: they end in different parts of the filling."""


def test_an_artifact_that_does_not_fit_leaves_everything_as_it_was(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tests.fault.test_engine_memory", str(tmp_path)],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    seen = json.loads(child.stdout.splitlines()[-1])
    for margin in MARGINS:
        attempt = seen["attempts"][str(margin)]
        assert attempt["error"].startswith("SlotMemoryError: "), seen
        assert seen["artifact_id"] in attempt["error"]
        assert f"{seen['bytes']} bytes" in attempt["error"]
        assert attempt["idle"] == ["empty", ""]
        assert attempt["live_unchanged"], "what serves must not notice"
    assert len({attempt["filled"] for attempt in seen["attempts"].values()}) >= 2, seen
    assert seen["growth"] < 4 * MEBI, "failed attempts must free what they took"
    assert seen["afterwards"] == "as if nothing had happened"


def _run(directory: Path) -> dict[str, Any]:
    from forge_ptq.engine.types import SlotMemoryError
    from tests.integration.engine_support import (
        Harness,
        artifact_of,
        changed,
        hf_state,
        prompts,
        save_qwen3,
        tokens_of,
    )

    sizes = {"vocab_size": 16_010, "hidden_size": 256, "intermediate_size": 2048}
    save_qwen3(directory / "hf", tied=False, num_hidden_layers=4, **sizes)
    state = hf_state(directory / "hf")
    harness = Harness(directory / "hf", enable_prefix_caching=False)
    core = harness.core
    asked = prompts(3)
    good = artifact_of(changed(state, 1), 1)
    other = artifact_of(changed(state, 2), 2)
    harness.publish(other)
    expected = tokens_of(harness.generate(asked))
    harness.publish(good)
    live = tokens_of(harness.generate(asked))
    harness.do(lambda: core.discard(previous=True))

    filled = 0
    fill = core.bank.fill

    def counted(slot: int, plan: Any) -> Any:
        nonlocal filled
        filled = 0
        for _ in fill(slot, plan):
            filled += 1
            yield

    core.bank.fill = counted  # type: ignore[method-assign]
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = _address_space()
    attempts: dict[str, Any] = {}
    candidates = {margin: harness.candidate(other) for margin in MARGINS}
    for margin, candidate in candidates.items():
        resource.setrlimit(resource.RLIMIT_AS, (_address_space(), hard))
        ballast = harness.do(partial(_fill_up, margin))
        error = "none"
        try:
            job = partial(core.stage, candidate, 1.0)
            harness.thread.run_job(job).result(60)
        except SlotMemoryError as raised:
            error = f"{type(raised).__name__}: {raised}"
        idle = core.slots[core.idle]
        attempts[str(margin)] = {
            "error": error,
            "idle": [idle.state, idle.role],
            "live_unchanged": tokens_of(harness.generate(asked)) == live,
            "filled": filled,
        }
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        harness.do(ballast.clear)
    growth = _address_space() - before
    harness.publish(other)
    afterwards = tokens_of(harness.generate(asked)) == expected
    harness.do(core.rollback)
    afterwards &= tokens_of(harness.generate(asked)) == live
    harness.thread.stop()
    return {
        "artifact_id": other.manifest.artifact_id,
        "bytes": other.manifest.nbytes,
        "attempts": attempts,
        "growth": growth,
        "afterwards": "as if nothing had happened" if afterwards else "different",
    }


def _fill_up(margin: int) -> list[Any]:
    """Take what is left under the limit, memory that the allocator keeps for later too, down to
    ``margin`` MiB. Runs on the engine thread, whose arena the filling will use."""
    import torch

    pieces: list[Any] = []
    try:
        while len(pieces) < 4096:
            pieces.append(torch.empty(MEBI, dtype=torch.uint8))
    except RuntimeError:
        del pieces[-margin:]
        return pieces
    raise AssertionError("no limit was reached within 4 GiB")


def _address_space() -> int:
    """Bytes of this process's address space, which RLIMIT_AS limits."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    print(json.dumps(_run(Path(sys.argv[1]))))
