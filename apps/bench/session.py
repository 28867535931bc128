"""One session of a run: the real command `python -m apps.grpo_ptq.main`, watched from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

REPO = Path(__file__).resolve().parents[2]

SMALL = (
    "group_size=4", "local_batch_size=8", "max_res_tokens=8", "rollout_threads=2",
    "ptq.probe.sequences=6", "ptq.probe.min_sequences=2", "ptq.publish_every=1",
    "ptq.calibration.rollouts=8", "ptq.sampler.probe_fraction=0.5", "debug.inject=[]",
)  # fmt: skip
"""Overrides of configs/tiny_cpu.yaml that make a training step take a fraction of a second."""


class SessionError(AssertionError):
    """The command did not do what was waited for; the message has its output."""


class Session:
    """One started command; leaving the context ends whatever is left of it.

    `output_dir` holds its folder `name`; a second session of the same name resumes the run.
    """

    def __init__(self, model: Path, output_dir: Path, name: str, *overrides: str) -> None:
        self.folder = output_dir / name
        command = [
            sys.executable, "-m", "apps.grpo_ptq.main",
            "--config", str(REPO / "configs" / "tiny_cpu.yaml"),
            f"model={model}", f"output_dir={output_dir}", f"run_name={name}", *SMALL, *overrides,
        ]  # fmt: skip
        self.started = time.monotonic()
        self._pids_before = self._pids_mtime()
        self.process = subprocess.Popen(
            command,
            cwd=REPO,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.family: set[int] = {self.process.pid}

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pid in self.family | self._children():
            if psutil.pid_exists(pid):
                psutil.Process(pid).kill()
        self.process.wait(10)

    def _children(self) -> set[int]:
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return set()
        return {child.pid for child in found}

    # ---- what it wrote ---- #

    def summary(self) -> dict[str, Any]:
        """summary.json as it is now; empty while there is none."""
        path = self.folder / "summary.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def step(self) -> int:
        """The last training step on record."""
        return max((record["step"] for record in self.summary().get("history", [])), default=0)

    def _pids_mtime(self) -> int:
        path = self.folder / "pids.json"
        return path.stat().st_mtime_ns if path.exists() else 0

    def components(self) -> dict[str, list[int]]:
        """Process ids by component as this session wrote them down; empty until it has."""
        if self._pids_mtime() == self._pids_before:
            return {}
        found = json.loads((self.folder / "pids.json").read_text())
        others = self._children() - {pid for pids in found.values() for pid in pids}
        stores = [pid for pid in others if _log_name(pid) == "store.log"]
        return {**found, "store": stores} if stores else found

    def pids(self, component: str) -> list[int]:
        """Process ids of one component."""
        return self.components()[component]

    # ---- waiting and killing ---- #

    def running(self) -> bool:
        """Whether the command runs; remembers its processes."""
        self.family |= self._children()
        return self.process.poll() is None

    def wait_for_step(self, step: int, timeout_s: float = 150) -> None:
        """Returns once training step `step` is on record; SessionError if the command ends."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            alive = self.running()
            if self.step() >= step:
                return
            if not alive:
                raise SessionError(f"the run ended early:\n{self.process.communicate()[0]}")
            time.sleep(0.1)
        raise SessionError(f"step {step} not reached in {timeout_s} s: {self.summary()}")

    def kill(self, component: str) -> int:
        """SIGKILL to the component's first process ("command": the command); returns its pid."""
        self.running()
        pid = self.process.pid if component == "command" else self.pids(component)[0]
        os.kill(pid, signal.SIGKILL)
        return pid

    def finish(self, timeout_s: float = 240) -> tuple[int, str]:
        """Exit code and output. SessionError if a process of the session is left."""
        self.running()
        output, _ = self.process.communicate(timeout=timeout_s)
        end = time.monotonic() + 10
        while (left := self.alive()) and time.monotonic() < end:
            time.sleep(0.1)
        if left:
            raise SessionError(f"processes left behind: {left}")
        return self.process.returncode, output

    def alive(self) -> list[str]:
        """Processes of the session that still live (zombies do not count)."""
        lines = []
        for pid in self.family:
            try:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    lines.append(f"{pid} {' '.join(process.cmdline())[:120]}")
            except psutil.NoSuchProcess:
                continue
        return lines


def _log_name(pid: int) -> str:
    """The file that a process writes its output to."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/fd/1"))
    except OSError:
        return ""
