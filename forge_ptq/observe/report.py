"""What happened in a run, collected while it runs: the source of summary.json and summary.png.

    with RunReport(run_dir, config, view) as report:       # writes the summary however it ends
        with report.phase("rollout/generate"): ...         # seconds per phase
        report.add_rollout(tokens=120, versions=[3])
        report.add_publish(verdict)
        report.end_step(step, reward=0.5, metrics={...})

The summary is rewritten after every step, so even a killed run leaves one (status "running"). Where
that fails, as on a full disk, the run goes on and says so. A later session of the run, in the same
folder, starts from it: see records.py; one that cannot be read is set aside. `wall_s`, `phases` and
`first_rollout_s` are of the last session; `rollout_s` and the rest are over all, `wall_s_before`
over the ones before it. Rollout tasks, the training loop and publishes report side by side from one
event loop or from threads; a phase's seconds are the sum over all of them and may exceed the wall
time.
"""

from __future__ import annotations

import asyncio
import os
import platform
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from .phases import PhaseTimes
from .records import OUTCOMES, WINDOW, Records
from .run_dir import RunDir
from .summary import (
    as_dict,
    is_number,
    mean,
    package_versions,
    plain,
    read_json,
    set_aside,
    write_json,
)

ROLLOUTS = "rollout/"
"""Phases of rollouts; the clock of `tokens_per_s` starts with the first."""


class View(Protocol):
    """Someone who watches a run. See console.py."""

    def start(self) -> None: ...

    def note(self, text: str) -> None: ...

    def show(self, snapshot: Mapping[str, Any]) -> None: ...

    def step(self, record: Mapping[str, Any]) -> None: ...

    def publish(self, record: Mapping[str, Any]) -> None: ...

    def stop(self) -> None: ...


class RunReport:
    """Collects one run's records. Thread-safe."""

    def __init__(
        self,
        run_dir: RunDir,
        config: Mapping[str, Any] | None = None,
        view: View | None = None,
        *,
        started: float | None = None,
    ) -> None:
        """`config`: the resolved configuration as plain values. `started`: time.monotonic() at the
        command's start, for `first_rollout_s` and `wall_s`; defaults to now."""
        self.run_dir = run_dir
        self._config = dict(config or {})
        self._view = view
        self._lock = threading.RLock()
        self._started = time.monotonic() if started is None else started
        self._rollouts_began: float | None = None
        self._first_rollout: float | None = None
        self._ended: float | None = None
        self._write_failed = False
        self._serving: dict[str, Any] | None = None
        # Read before anything is written: a session that fails in start-up keeps it all.
        try:
            self._records = Records(read_json(run_dir.summary))
        except (ValueError, TypeError) as error:
            aside = set_aside(run_dir.summary)
            self._records = Records(None)
            name = run_dir.summary.name
            text = f"{name} of earlier sessions cannot be used, it is now {aside.name}: {error}"
            self.add_event("summary", text)
        self._phases: dict[str, PhaseTimes] = {}
        self._resumed_from = 0
        self._status = "running"
        self._error: str | None = None

    # ---- collecting ---- #

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to phase `name`, also when it raises."""
        begin = time.monotonic()
        with self._lock:
            if self._rollouts_began is None and name.startswith(ROLLOUTS):
                self._rollouts_began = begin
        try:
            yield
        finally:
            with self._lock:
                self._phases.setdefault(name, PhaseTimes()).add(time.monotonic() - begin)

    def add_rollout(self, *, tokens: int, versions: Iterable[int | None] = ()) -> None:
        """One group of responses: their tokens in all, and the policy versions that made them."""
        with self._lock:
            self._records.served.update(version for version in versions if version is not None)
            if self._first_rollout is None:
                self._first_rollout = time.monotonic()
            self._records.tokens += tokens

    def add_publish(self, verdict: Any) -> dict[str, Any]:
        """The verdict on one candidate: a dataclass or a mapping with at least version, outcome."""
        values = as_dict(verdict)
        record = {"version": values.pop("version"), "verdict": values.pop("outcome"), **values}
        record["at_s"] = self._elapsed()
        with self._lock:
            self._records.add_publish(record)
            snapshot = self._summary()
        if self._view is not None:
            self._view.publish(record)
            self._view.show(snapshot)
        return record

    def add_rollback(self, step: int, rollback: Any) -> None:
        """A version that was taken back after training step `step`: a dataclass with a text form,
        or a mapping."""
        record = {"step": step, **as_dict(rollback), "at_s": self._elapsed()}
        with self._lock:
            self._records.add_rollback(record)
        self.add_event("rollback", str(rollback))

    def add_event(self, kind: str, text: str) -> None:
        """Something worth telling, such as a process that died and came back."""
        with self._lock:
            self._records.add_event({"kind": kind, "text": text, "at_s": self._elapsed()})
        self.note(text)

    def serving(self, found: Mapping[str, Any]) -> None:
        """What serves, and what should: as found after a resume and at the end."""
        with self._lock:
            self._serving = dict(found)

    def note(self, text: str) -> None:
        """Shows a line to whoever watches; it is not kept."""
        if self._view is not None:
            self._view.note(text)

    def end_step(
        self, step: int, reward: float, metrics: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """Closes training step `step` and rewrites the summary.

        `reward`: mean reward of the batch trained on. `metrics`: further numbers of the step, kept
        as they are.
        """
        with self._lock:
            record = {
                "step": step,
                "at_s": self._elapsed(),
                "reward": reward,
                "tokens": self._records.tokens,
                **{k: float(v) for k, v in (metrics or {}).items()},
            }
            self._records.add_step(record)
            self._write()
            snapshot = self._summary()
        if self._view is not None:
            self._view.step(record)
            self._view.show(snapshot)
        return record

    def restore(self, step: int, reward: float | None = None) -> None:
        """Goes on after training step `step` of an earlier session in the same folder: what was
        recorded of later steps is dropped, the rest stays. `reward`: of that step, whose record is
        missing if the session died between saving and recording it. Without this call the first
        step or publish decides where the run goes on."""
        with self._lock:
            self._resumed_from = step
            self._records.settle(step)
            kept = self._records.steps
            if reward is not None and (not kept or kept[-1]["step"] < step):
                record = {"step": step, "at_s": self._elapsed(), "reward": reward}
                self._records.add_step({**record, "tokens": self._records.tokens})

    # ---- ending ---- #

    def start(self) -> None:
        """Begins to show; entering the report as a context does it too."""
        if self._view is not None:
            self._view.start()

    def __enter__(self) -> RunReport:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish("completed")
        elif isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            self.finish("interrupted")
        else:
            self.finish("failed", f"{type(error).__name__}: {error}")

    def finish(self, status: str, error: str | None = None) -> dict[str, Any]:
        """Writes summary.json and summary.png; only the first call's status counts."""
        with self._lock:
            if self._ended is None:
                self._ended = time.monotonic()
                self._status, self._error = status, error
            self._write()
            summary = self._summary()
        if self._view is not None:
            self._view.stop()
        from .plot import draw

        try:
            draw(plain(summary), self.run_dir.plot)
        except OSError as error:
            self.note(f"{self.run_dir.plot.name} is not drawn: {error}")
        return summary

    def _write(self) -> None:
        """The summary into its file; that stays as it was on a disk that is full, which is told."""
        try:
            write_json(self.run_dir.summary, self._summary())
        except OSError as error:
            if not self._write_failed:
                self.add_event("disk", f"{self.run_dir.summary.name} cannot be written: {error}")
            self._write_failed = True
        else:
            self._write_failed = False

    def summary(self) -> dict[str, Any]:
        """The summary as of now."""
        with self._lock:
            return self._summary()

    def _elapsed(self) -> float:
        end = time.monotonic() if self._ended is None else self._ended
        return round(end - self._started, 3)

    def _rollout_s(self) -> float:
        """Seconds since rollouts began, over all sessions."""
        seconds = self._records.rollout_s_before
        if self._rollouts_began is not None:
            end = time.monotonic() if self._ended is None else self._ended
            seconds += end - self._rollouts_began
        return seconds

    def _summary(self) -> dict[str, Any]:
        kept = self._records
        rewards = [r["reward"] for r in kept.steps]
        last = kept.steps[-1]["step"] if kept.steps else 0
        rollout_s = self._rollout_s()
        first = self._first_rollout
        return {
            "run": self.run_dir.name,
            "status": self._status,
            "error": self._error,
            "model": self._config.get("model"),
            "seed": self._config.get("seed"),
            "max_perplexity_rise": _limit(self._config),
            "steps": max(last, self._resumed_from),
            "resumed_from": self._resumed_from,
            **{key: kept.outcomes[key] for key in OUTCOMES},
            "calibrations": kept.calibrations,
            "calibrate_s": round(kept.calibrate_s, 3),
            "reward_first10": mean(rewards[:WINDOW]),
            "reward_last10": mean(rewards[-WINDOW:]),
            "served_versions": sorted(kept.served),
            "serving": self._serving,
            "tokens": kept.tokens,
            "rollout_s": round(rollout_s, 3),
            "tokens_per_s": round(kept.tokens / rollout_s, 1) if rollout_s > 0 else 0.0,
            "first_rollout_s": None if first is None else round(first - self._started, 2),
            "wall_s": self._elapsed(),
            "wall_s_before": round(kept.wall_s_before, 3),
            "phases": {name: times.summary() for name, times in sorted(self._phases.items())},
            "publishes": [dict(p) for p in kept.publishes],
            "history": [dict(r) for r in kept.steps],
            "rollbacks": [dict(r) for r in kept.rollbacks],
            "events": [dict(e) for e in kept.events],
            "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
            "packages": dict(package_versions()),
        }


def _limit(config: Mapping[str, Any]) -> float | None:
    value = config.get("ptq", {}).get("guard", {}).get("max_perplexity_rise")
    return float(value) if is_number(value) else None
