"""Kills a run at random moments, resumes it, and checks after every session that nothing is broken.

    python -m apps.bench.kills --kills 20 [--at-most-s 200]

What dies is the command itself or one of its processes, with SIGKILL, at a random moment of the
start-up or of the training. A component that the run survives is respawned within the session; else
the next session resumes. In the end the run must have every step once, and its generators must
serve what is committed. With --at-most-s it stops after a session and goes on when called again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge_ptq import guard_state
from forge_ptq.observe.records import OUTCOMES
from forge_ptq.training import checkpoints

from .options import write
from .session import Session, SessionError

AFTER_KILL_S = 150.0
"""For the run to end or to go on after a kill."""
STEPS_ON = 2
"""Steps after a kill by which the run is taken to go on."""


def check_run(folder: Path, steps: int | None = None) -> dict[str, Any]:
    """What a session left, whatever ended it: SessionError unless it is all whole.

    The summary's history has every step once; all checkpoints and guard states can be read and hold
    finite numbers; the generators serve the committed artifact. `steps`: the run must have exactly
    these. Returns the summary.
    """

    def require(holds: bool, text: str) -> None:
        if not holds:
            raise SessionError(f"{folder.name}: {text}")

    path = folder / "summary.json"
    if not path.exists():
        return {}  # killed before the first step
    summary: dict[str, Any] = json.loads(path.read_text())
    history = [record["step"] for record in summary["history"]]
    require(history == list(range(1, len(history) + 1)), f"history {history}")
    require(steps is None or len(history) == steps, f"{len(history)} steps, expected {steps}")
    versions = [p["version"] for p in summary["publishes"]]
    require(versions == sorted(versions), f"publishes {versions}")
    require(not list(folder.glob("summary.json.damaged-*")), "a summary was damaged")
    saved = folder / "checkpoint"
    for step in checkpoints.complete_steps(saved):
        require(step <= len(history) + 1, f"a checkpoint of step {step} after {history[-1:]}")
        require(_finite(checkpoints.path_of(saved, step)), f"step {step} holds NaN or infinities")
    for key in guard_state.found(saved):
        guard_state.load(saved, key)
    serving = summary["serving"] or {}  # as found after a resume and at the end
    live = set(serving.get("live", []))
    require(live <= {serving.get("committed")}, f"serving {serving}")
    require(steps is None or bool(live), f"what serves at the end is not known: {serving}")
    return summary


def _finite(path: Path) -> bool:
    """Reads a whole checkpoint of the trainer; whether all its numbers are finite."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict[str, Any] = {}
    _load_state_dict(
        found,
        storage_reader=FileSystemReader(path),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    json.loads((path / checkpoints.STATE).read_text())

    def finite(value: Any) -> bool:
        if isinstance(value, dict):
            return all(map(finite, value.values()))
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return bool(torch.isfinite(value).all())
        return True

    return bool(found) and finite(found)


def kill_in(
    session: Session, rng: random.Random, target: str | None = None
) -> dict[str, Any] | None:
    """Kills something (or `target`) at a random moment and waits for what comes of it. None if the
    session ended before, or the process had just died."""
    if rng.random() < 0.75:  # in training
        while session.running() and not session.components():
            time.sleep(0.02)
        moment = session.step() + rng.randint(1, 6)
        while session.running() and session.step() < moment:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.5))
    else:
        end = time.monotonic() + rng.uniform(0.5, 25.0)
        while session.running() and time.monotonic() < end:
            time.sleep(0.02)
    components = session.components()
    if target is None:
        processes = {pids[0]: name for name, pids in sorted(components.items())}  # some share one
        target = rng.choice(["command"] * max(1, len(processes) // 3) + list(processes.values()))
    before, started = session.step(), time.monotonic()
    try:
        pid = session.kill(target)
    except (ProcessLookupError, KeyError):
        return None
    print(f"killed {target} ({pid}) after step {before}", file=sys.stderr, flush=True)
    while session.running() and session.step() < before + STEPS_ON:
        if time.monotonic() - started > AFTER_KILL_S:
            raise SessionError(f"{target} was killed after step {before} and nothing followed")
        time.sleep(0.1)
    return {
        "target": target,
        "after_step": before,
        "in_start_up": not components,
        "outcome": "went on" if session.running() else "stopped",
        "seconds": round(time.monotonic() - started, 1),
    }


def run_kills(
    start: Callable[[], Session], kills: int, steps: int, rng: random.Random, at_most_s: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(kills done, final summary); the summary is empty if time ran out before the run's end."""
    began = time.monotonic()
    done: list[dict[str, Any]] = []
    while True:
        with start() as session:
            while len(done) < kills and session.running():
                late = time.monotonic() - began > at_most_s
                record = kill_in(session, rng, "command" if late else None)
                if record is not None:
                    done.append(record)
            code, output = session.finish()
        summary = check_run(session.folder)
        if code == 0:
            return done, check_run(session.folder, steps)
        if code not in (1, -9):
            raise SessionError(f"exit code {code}:\n{output}")
        if time.monotonic() - began > at_most_s:
            return done, {}
        print(f"resuming after step {summary.get('steps', 0)}", file=sys.stderr, flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--steps", type=int, default=150, help="of the whole run")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--model", type=Path, default=Path("models/tiny"))
    options.add_argument("--at-most-s", type=float, default=float("inf"))
    options.add_argument("--folder", type=Path, default=Path("outputs"))
    options.add_argument("--out", type=Path, default=Path("docs/results/kills.json"))
    arguments = options.parse_args()
    name = f"kills-{arguments.kills}-{arguments.seed}"
    state = arguments.folder / f"{name}.json"
    kills: list[dict[str, Any]] = json.loads(state.read_text()) if state.exists() else []
    if not kills:
        shutil.rmtree(arguments.folder / name, ignore_errors=True)
    settings = (f"trainer.training.steps={arguments.steps}", "trainer.checkpoint.interval=2")

    def start() -> Session:
        model, folder = arguments.model.resolve(), arguments.folder.resolve()
        return Session(model, folder, name, *settings)

    rng = random.Random(f"{arguments.seed} {len(kills)}")
    left = arguments.kills - len(kills)
    done, summary = run_kills(start, left, arguments.steps, rng, arguments.at_most_s)
    kills += done
    if not summary:
        state.write_text(json.dumps(kills))
        print(f"{len(kills)} of {arguments.kills} kills done; call it again", file=sys.stderr)
        return
    state.unlink(missing_ok=True)
    if len(kills) < arguments.kills:
        raise SessionError(f"the run ended after {len(kills)} kills: give it more --steps")
    results = {
        "kills": kills,
        "steps": summary["steps"],
        "history_complete": True,
        "serving": summary["serving"],
        "outcomes": {key: summary[key] for key in OUTCOMES},
        "events": len(summary["events"]),
    }
    del arguments.folder, arguments.at_most_s  # of no meaning elsewhere
    write(arguments, results)


if __name__ == "__main__":
    main()
