"""How long a run takes to recover from the death of each of its processes, beside a normal publish.

    python -m apps.bench.recovery                      # on an idle machine

One run on the tiny policy. Its components are killed one after the other with SIGKILL while it
trains, each --repeats times. What the run survives is timed until the component is back
(`back_s`), until the next training step is on record (`step_s`), and until a version newer than
those before the kill is accepted (`publish_s`). What ends the run is timed until the command has
ended and said so (`ended_s`), until the resumed command has trained a step (`step_s`) and has
accepted a version (`publish_s`), both from the kill on; its start-up from the command line is
`start_s`. Times are read off the run's files every 20 ms, so they end with the step that follows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from forge_ptq.observe.summary import SWAPPED

from .kills import check_run
from .options import write
from .session import Session, SessionError

SURVIVED = ("policy", "quantizer", "stats_merger", "ref_model")
FATAL = ("trainer", "replay_buffer", "store", "command")
TIMEOUT_S = 200.0
QUIET_STEPS = 4
"""Trained before each kill."""

Times = dict[str, float]


def until(condition: Callable[[], bool], what: str) -> None:
    """SessionError if it does not come about."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > end:
            raise SessionError(f"waited {TIMEOUT_S:g} s in vain for {what}")
        time.sleep(0.02)


def since(moment: float) -> float:
    """Seconds, to the hundredth: the files are looked at every two."""
    return round(time.monotonic() - moment, 2)


def accepted(session: Session) -> int:
    """The newest version that passed the gate."""
    publishes = session.summary().get("publishes", [])
    return max((p["version"] for p in publishes if p["verdict"] in SWAPPED), default=0)


def quiet(session: Session) -> None:
    """Lets the run train undisturbed for a few steps."""
    session.wait_for_step(session.step() + QUIET_STEPS)


def watch(session: Session, started: float, step: int, version: int) -> Times:
    """Seconds until the run trains again and until it serves something new."""
    times: Times = {}
    until(lambda: session.running() and session.step() > step, "a training step")
    times["step_s"] = since(started)
    until(lambda: session.running() and accepted(session) > version, "an accepted version")
    times["publish_s"] = since(started)
    return times


def survived(session: Session, component: str) -> Times:
    """Kills a component that the run brings back."""
    quiet(session)
    before, step, version = session.pids(component), session.step(), accepted(session)
    started = time.monotonic()
    session.kill(component)
    back: Times = {}

    def is_back() -> bool:
        now = session.components().get(component, [])
        return bool(now) and not set(now) & set(before)

    if component in ("policy", "ref_model"):  # nothing goes on without
        until(is_back, f"{component} to come back")
        back["back_s"] = since(started)
        return {**back, **watch(session, started, step, version)}
    times = watch(session, started, step, version)
    until(is_back, f"{component} to come back")
    return {"back_s": since(started), **times}


def fatal(start: Callable[[], Session], component: str) -> Times:
    """Kills a component that the run ends with, in a session of its own, and resumes in another."""
    with start() as session:
        quiet(session)
        started = time.monotonic()
        session.kill(component)
        code, output = session.finish(TIMEOUT_S)
    times = {"ended_s": since(started)}
    if component != "command" and code != 1:
        raise SessionError(f"{component} was killed and the exit code is {code}:\n{output}")
    before = check_run(session.folder)["wall_s_before"]
    begun = time.monotonic()
    with start() as session:

        def written() -> dict[str, Any]:
            found = session.summary()
            return found if session.running() and found["wall_s_before"] != before else {}

        def serves_newer() -> bool:
            found = written()
            return any(
                p["version"] > found["resumed_from"] and p["verdict"] in SWAPPED
                for p in found.get("publishes", [])
            )

        until(lambda: bool(written()), "a training step of the resumed run")
        times["step_s"] = since(started)
        times["start_s"] = since(begun)
        until(serves_newer, "an accepted version of the resumed run")
        times["publish_s"] = since(started)
        session.kill("command")
        session.finish(TIMEOUT_S)
    return times


def normal(summary: dict[str, Any]) -> dict[str, float]:
    """Medians over the run: seconds of a step and of a publish."""
    steps = summary["history"]
    gaps = [b["at_s"] - a["at_s"] for a, b in pairwise(steps)]
    walls = [p["wall_s"] for p in summary["publishes"] if p["verdict"] in SWAPPED]
    return {
        "step_s": round(statistics.median(gap for gap in gaps if gap > 0), 2),
        "publish_s": round(statistics.median(walls), 2),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--only", nargs="*", default=[*SURVIVED, *FATAL])
    options.add_argument("--model", type=Path, default=Path("models/tiny"))
    options.add_argument("--folder", type=Path, default=Path("outputs"))
    options.add_argument("--out", type=Path, default=Path("docs/results/recovery.json"))
    arguments = options.parse_args()
    shutil.rmtree(arguments.folder / "recovery", ignore_errors=True)
    settings = ("trainer.training.steps=100000", "trainer.checkpoint.interval=2")

    def start() -> Session:
        model, folder = arguments.model.resolve(), arguments.folder.resolve()
        return Session(model, folder, "recovery", *settings)

    found: dict[str, list[Times]] = {}
    if wanted := [name for name in SURVIVED if name in arguments.only]:
        with start() as session:
            for name in wanted:
                found[name] = [survived(session, name) for _ in range(arguments.repeats)]
                print(name, found[name], file=sys.stderr, flush=True)
            session.kill("command")
            session.finish(TIMEOUT_S)
    for name in FATAL:
        if name in arguments.only:
            found[name] = [fatal(start, name) for _ in range(arguments.repeats)]
            print(name, found[name], file=sys.stderr, flush=True)
    summary = check_run((arguments.folder / "recovery").resolve())
    results: dict[str, Any] = {
        "normal": normal(summary),
        "components": _medians(found),
        "single": found,
    }
    before = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for key in ("components", "single"):  # those measured in another call stay
        results[key] = {**before.get(key, {}), **results[key]}
    del arguments.folder  # of no meaning elsewhere
    write(arguments, results)


def _medians(found: dict[str, list[Times]]) -> dict[str, Times]:
    return {
        name: {key: round(statistics.median(t[key] for t in times), 2) for key in times[0]}
        for name, times in found.items()
    }


if __name__ == "__main__":
    main()
