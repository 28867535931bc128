"""Runs the real command `python -m apps.grpo_ptq.main` on a small random policy, for tests that
watch the whole loop: processes, files and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

REPO = Path(__file__).resolve().parent.parent


def make_policy(folder: Path) -> Path:
    """A tiny Qwen3 policy with random weights: trains and generates, knows nothing."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from forge_ptq.models import tiny
    from forge_ptq.models.checkpoint import write_folder

    config = tiny.config_dict(hidden=192, layers=2, intermediate=256)

    def fill(target: Path) -> None:
        tiny.write_assets(target, config)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen3Config(**config)).to(torch.bfloat16)
        model.save_pretrained(target)

    return write_folder(folder, fill, {"kind": "random tiny policy"})


class Run:
    """One started command. `output_dir` holds its folder `name`."""

    def __init__(self, model: Path, output_dir: Path, name: str, *overrides: str) -> None:
        self.folder = output_dir / name
        self.command = [
            sys.executable, "-m", "apps.grpo_ptq.main",
            "--config", str(REPO / "configs" / "tiny_cpu.yaml"),
            f"model={model}", f"output_dir={output_dir}", f"run_name={name}",
            "group_size=4", "local_batch_size=8", "max_res_tokens=8", "rollout_threads=2",
            "ptq.probe.sequences=6", "ptq.probe.min_sequences=2", "ptq.publish_every=1",
            "ptq.calibration.rollouts=8",
            "ptq.sampler.probe_fraction=0.5", "debug.inject=[]",
            *overrides,
        ]  # fmt: skip
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            self.command,
            cwd=REPO,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.family: set[int] = {self.process.pid}

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc_info: object) -> None:
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

    def summary(self) -> dict[str, Any]:
        """summary.json as it is now; empty while there is none."""
        path = self.folder / "summary.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def pids(self, component: str) -> list[int]:
        """Process ids of a component as the run wrote them down."""
        return json.loads((self.folder / "pids.json").read_text())[component]

    def wait_for_step(self, step: int, timeout_s: float = 150) -> None:
        """Returns once training step `step` has ended; fails with the output if the run ends."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            self.family |= self._children()
            if any(record["step"] >= step for record in self.summary().get("history", [])):
                return
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended early:\n{self.process.communicate()[0]}")
            time.sleep(0.1)
        raise AssertionError(f"step {step} not reached in {timeout_s} s: {self.summary()}")

    def kill(self, component: str) -> int:
        """SIGKILL to the component's first process; returns its pid."""
        pid = self.pids(component)[0]
        os.kill(pid, signal.SIGKILL)
        return pid

    def finish(self, timeout_s: float = 240) -> tuple[int, str]:
        """Exit code and output. Checks that no process of the run is left."""
        self.family |= self._children()
        output, _ = self.process.communicate(timeout=timeout_s)
        end = time.monotonic() + 5
        while (left := self.alive()) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left, f"processes left behind: {left}"
        return self.process.returncode, output

    def alive(self) -> list[str]:
        """Processes of the run that still live (zombies do not count)."""
        lines = []
        for pid in self.family:
            try:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    lines.append(f"{pid} {' '.join(process.cmdline())[:120]}")
            except psutil.NoSuchProcess:
                continue
        return lines
