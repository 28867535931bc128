"""Does training on quantized rollouts reach what training on full-precision ones does?

    python -m apps.grpo_ptq.compare --config configs/compare_tiny_cpu.yaml
        [--arms NAME,...] [--seeds N,...] [--output-dir DIR] [--report-only] [key.path=value ...]

Every arm is a set of overrides of one base configuration. For each seed and each arm in turn the
real command `python -m apps.grpo_ptq.main` runs, one at a time, with the same seed and so the same
questions in the same order. Overrides given after the options go to all runs.

output_dir/ARM-seedN/       the run's own folder, and compare.json: its settings and its exit code
output_dir/ARM-seedN.log    what it printed, and its evaluation after it
output_dir/compare.json     numbers of every run and every arm; compare.md, a table of them
output_dir/compare.png      curves with 95 % bands over the seeds

The policies that the runs have trained are then evaluated in full precision
(`apps.grpo_ptq.evaluate`): what a run reports is its generator's reward.

A run that has completed is not run again; one that has failed is, after its folder has been set
aside, and stays in the table as a failed attempt. The command exits with 1 if an arm has no
completed run or a run failed this time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from forge_ptq.config import Block, ConfigError, from_mapping, load_config
from forge_ptq.config.block import NaturalInt, Positive, PositiveShare
from forge_ptq.observe.summary import read_json, write_json

from .compare_numbers import Run, compare, record_of
from .compare_plot import draw
from .compare_table import markdown
from .evaluate import RESPONSES, RESULT, SEED

STOP_S = 60.0
"""Seconds for a run to end by itself after SIGTERM."""


@dataclass(kw_only=True)
class ArmConfig(Block):
    """One arm."""

    label: str
    """What the table and the legend call it."""

    group: str = "arms"
    """Arms of one group share a column of the picture."""

    overrides: list[str] = field(default_factory=list)
    """Of the base configuration, as on the command line of a run."""


@dataclass(kw_only=True)
class CompareConfig(Block):
    """A comparison."""

    base: str
    """Configuration of the runs."""

    output_dir: str
    """Folder of the runs and of the result."""

    seeds: list[NaturalInt]
    """One run per arm and seed."""

    arms: dict[str, ArmConfig]
    """The arms, by name."""

    reference: str
    """Arm that the others are compared with."""

    default: str
    """Arm whose reward should reach `agreement` of the reference's."""

    agreement: PositiveShare = 0.99
    """Final reward of `default` over that of `reference` that counts as reached."""

    questions: NaturalInt = 1024
    """That every trained policy is evaluated on; 0: no evaluation."""

    timeout_s: Positive = 1800.0
    """Longest run, seconds; also of an evaluation."""

    overrides: list[str] = field(default_factory=list)
    """Of the base configuration, for all arms."""


def load(path: str) -> CompareConfig:
    """The comparison in a YAML file. ConfigError names what is wrong with it."""
    cfg = from_mapping(CompareConfig, yaml.safe_load(Path(path).read_text(encoding="utf-8")))
    problems = [
        (key, f"got {name!r}, expected one of {', '.join(cfg.arms)}")
        for key, name in (("reference", cfg.reference), ("default", cfg.default))
        if name not in cfg.arms
    ]
    problems += [
        (f"arms.{name}", "expected a name of letters, digits and _")
        for name in cfg.arms
        if not re.fullmatch(r"\w+", name)
    ]
    if not cfg.seeds or len(set(cfg.seeds)) < len(cfg.seeds):
        problems.append(("seeds", f"got {cfg.seeds}, expected different seeds"))
    if problems:
        raise ConfigError(problems, path)
    return cfg


class Comparison:
    """Runs what is missing and reads what is there."""

    def __init__(self, cfg: CompareConfig, output_dir: Path, extra: list[str]) -> None:
        self.cfg, self.output_dir, self.extra = cfg, output_dir, extra

    def settings(self, arm: str, seed: int) -> list[str]:
        """Overrides of one run, its place on disk not among them."""
        own = self.cfg.arms[arm].overrides
        return [*self.cfg.overrides, *own, *self.extra, f"seed={seed}"]

    def steps(self, arm: str) -> int:
        """Training steps of an arm. ConfigError if its configuration is not sound."""
        found = load_config(self.cfg.base, self.settings(arm, 0)).trainer
        kept = found.checkpoint.enable and found.checkpoint.last_save_in_hf
        if self.cfg.questions and not kept:
            message = (
                "expected true in every arm, or questions: 0: what is not kept is not evaluated"
            )
            keys = "trainer.checkpoint.enable and .last_save_in_hf"
            raise ConfigError([(f"arms.{arm}", f"{keys}: {message}")])
        return found.training.steps

    def folder(self, arm: str, seed: int) -> Path:
        """Of one run."""
        return self.output_dir / f"{arm}-seed{seed}"

    def read(self, arm: str, seed: int) -> Run | None:
        """A run that has ended, well or not; None where there is none. ValueError if it was made
        with other settings."""
        folder = self.folder(arm, seed)
        made = read_json(folder / "compare.json")
        if made is None:
            return None
        if made["settings"] != self.settings(arm, seed):
            raise ValueError(
                f"{folder}: made with {made['settings']}; expected {self.settings(arm, seed)}. "
                "Use another output_dir, or remove the folder"
            )
        return self._record(arm, seed, made)

    def _record(self, arm: str, seed: int, made: dict[str, Any]) -> Run:
        folder = self.folder(arm, seed)
        evaluation = read_json(folder / RESULT) if self.cfg.questions else None
        asked = {"questions": self.cfg.questions, "responses": RESPONSES, "seed": SEED}
        if evaluation is not None and not asked.items() <= evaluation.items():
            evaluation = None  # made with other questions: not to be compared
        return record_of(read_json(folder / "summary.json"), arm, seed, made, evaluation)

    def attempts(self, arm: str, seed: int) -> int:
        """Runs of that arm and seed that failed and were set aside."""
        return len(list(self.output_dir.glob(f"{arm}-seed{seed}.failed-*")))

    def run(self, arm: str, seed: int) -> Run:
        """One run from its start. A failed one is told of in its record, not raised."""
        folder = self.folder(arm, seed)
        if folder.exists():
            # One without the record was stopped along with this command.
            kind = "failed" if (folder / "compare.json").exists() else "interrupted"
            number = len(list(self.output_dir.glob(f"{folder.name}.{kind}-*"))) + 1
            folder.rename(folder.with_name(f"{folder.name}.{kind}-{number}"))
        self.output_dir.mkdir(parents=True, exist_ok=True)
        settings = self.settings(arm, seed)
        place = [f"output_dir={self.output_dir}", f"run_name={folder.name}"]
        command = [sys.executable, "-m", "apps.grpo_ptq.main", "--config", self.cfg.base]
        began = time.monotonic()
        with folder.with_name(f"{folder.name}.log").open("w") as log:
            code = _bounded([*command, *settings, *place], log.fileno(), self.cfg.timeout_s)
        folder.mkdir(exist_ok=True)  # a run refused before it began has none
        seconds = time.monotonic() - began
        late = seconds >= self.cfg.timeout_s
        made = {
            "settings": settings,
            "exit_code": code,
            "wall_s": round(seconds, 1),
            "timed_out": late,
        }
        write_json(folder / "compare.json", made)
        return self._record(arm, seed, made)

    def unevaluated(self, arms: list[str], seeds: list[int]) -> list[tuple[str, int]]:
        """Completed runs whose trained policy is to be evaluated."""
        if not self.cfg.questions:
            return []
        runs = {(arm, seed): self.read(arm, seed) for seed in seeds for arm in arms}
        return [k for k, run in runs.items() if run and run.completed and run.evaluated is None]

    def evaluate(self, arm: str, seed: int) -> bool:
        """Evaluates the trained policy of a completed run; whether that went well."""
        folder = self.folder(arm, seed)
        command = [sys.executable, "-m", "apps.grpo_ptq.evaluate", str(folder)]
        command += ["--questions", str(self.cfg.questions)]
        with folder.with_name(f"{folder.name}.log").open("a") as log:
            return _bounded(command, log.fileno(), self.cfg.timeout_s) == 0


def _bounded(command: list[str], log: int, timeout_s: float) -> int:
    """Exit code of a command in a session of its own; negative is the signal that ended it."""
    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return _stop(process)
    except KeyboardInterrupt:
        _stop(process)
        raise


def _stop(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait(STOP_S)


def report(comparison: Comparison, arms: list[str], seeds: list[int]) -> dict[str, object]:
    """Reads all runs that have ended; writes compare.json, compare.md and compare.png."""
    cfg = comparison.cfg
    runs = [r for arm in arms for seed in seeds if (r := comparison.read(arm, seed)) is not None]
    failed = {arm: sum(comparison.attempts(arm, seed) for seed in seeds) for arm in arms}
    result = {
        "base": cfg.base,
        "settings": {arm: comparison.settings(arm, 0)[:-1] for arm in arms},
        **compare(runs, {a: cfg.arms[a].label for a in arms}, cfg.reference, cfg.default, failed),
        "agreement": cfg.agreement,
    }
    folder = comparison.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "compare.json", result)
    text = markdown(result)
    (folder / "compare.md").write_text(text, encoding="utf-8")
    draw(result, {arm: cfg.arms[arm].group for arm in arms}, folder / "compare.png")
    print(text)
    return result


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done, 1 if a run failed or an arm has none, 2 for a bad configuration."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--arms", type=lambda text: text.split(","), metavar="NAME,...")
    parser.add_argument("--seeds", type=integers, metavar="N,...")
    parser.add_argument("--output-dir", type=Path)
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    given = parser.parse_intermixed_args(argv)
    try:
        cfg = load(given.config)
        arms, seeds = given.arms or list(cfg.arms), given.seeds or cfg.seeds
        if unknown := [a for a in arms if a not in cfg.arms]:
            raise ConfigError([("arms", f"got {unknown}, expected some of {list(cfg.arms)}")])
        comparison = Comparison(cfg, given.output_dir or Path(cfg.output_dir), given.overrides)
        steps = {arm: comparison.steps(arm) for arm in arms}
        ended = {(a, s): comparison.read(a, s) for s in seeds for a in arms}
    except (ConfigError, ValueError, OSError, yaml.YAMLError) as error:
        print(f"{given.config}: {error}", file=sys.stderr)
        return 2
    failures = 0
    for (arm, seed), before in ended.items():
        if given.report_only or (before is not None and before.completed):
            continue
        print(f"{arm}, seed {seed}: {steps[arm]} steps", flush=True)
        run = comparison.run(arm, seed)
        failures += not run.completed
        print(f"{arm}, seed {seed}: {run.line()}", flush=True)
    for arm, seed in [] if given.report_only else comparison.unevaluated(arms, seeds):
        print(f"{arm}, seed {seed}: {cfg.questions} questions", flush=True)
        if not comparison.evaluate(arm, seed):
            failures += 1
            print(f"{arm}, seed {seed}: not evaluated, see its log", file=sys.stderr)
    result = json.loads(json.dumps(report(comparison, arms, seeds)))
    empty = [arm for arm in arms if not result["arms"][arm]["completed"]]
    for arm in empty:
        print(f"{arm}: no completed run", file=sys.stderr)
    return int(bool(failures or empty))


if __name__ == "__main__":
    sys.exit(main())
