"""`forge-ptq quantize`: a checkpoint in, a compressed-tensors INT8 checkpoint out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_ptq.numerics.names import RANGE_METHODS
from forge_ptq.numerics.plan import SCHEME_NAMES

if TYPE_CHECKING:
    from rich.console import Console

    from forge_ptq.offline import Job, Report


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "quantize",
        help="quantize a checkpoint to INT8 for vLLM, calibrated on rollouts",
        description="Writes a compressed-tensors checkpoint that stock vLLM serves. A quarter of "
        "the prompts is held out and gives the perplexity rise that is reported.",
    )
    parser.add_argument("--model", type=Path, required=True, help="full-precision HF checkpoint")
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="rollouts of that model: JSON lines with prompt_ids, token_ids and reward",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write, new or empty")
    parser.add_argument(
        "--default", default="int8_dynamic", choices=SCHEME_NAMES, help="scheme of every layer ..."
    )
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="PATTERN=SCHEME",
        help="... but of those that match, as in '*.down_proj=bf16'; may be repeated",
    )
    parser.add_argument(
        "--budget",
        type=float,
        help="choose schemes automatically within this perplexity rise, as in 0.03; overrides stay",
    )
    parser.add_argument(
        "--range", default="absmax", choices=RANGE_METHODS, help="|x| of a static code 127"
    )
    parser.add_argument("--percentile", type=float, default=99.99, help="for --range percentile")
    parser.add_argument("--no-smoothing", action="store_true", help="leave activations as they are")
    parser.add_argument("--alpha", type=float, help="smoothing strength in [0, 1]; else per layer")
    parser.add_argument(
        "--no-smooth-down-proj", action="store_true", help="leave down_proj's inputs as they are"
    )
    parser.add_argument("--batch-tokens", type=int, default=4096, help="per forward pass")
    parser.add_argument("--max-evaluations", type=int, default=24, help="plans measured, --budget")
    parser.add_argument("--policy-version", type=int, default=0, help="number for the manifest")
    parser.add_argument("--force", action="store_true", help="replace an earlier result in --out")
    parser.set_defaults(run=run)


def job_of(arguments: argparse.Namespace) -> Job:
    """The job that was asked for; JobError for an override that is not PATTERN=SCHEME."""
    from forge_ptq.offline import Job, JobError

    overrides = {}
    for entry in arguments.override:
        pattern, equals, scheme = entry.rpartition("=")
        if not equals or not pattern:
            raise JobError(f"--override: got {entry!r}, expected PATTERN=SCHEME")
        overrides[pattern] = scheme
    return Job(
        model=arguments.model,
        data=arguments.data,
        out=arguments.out,
        default=arguments.default,
        overrides=overrides,
        budget=arguments.budget,
        range=arguments.range,
        percentile=arguments.percentile,
        smoothing=not arguments.no_smoothing,
        alpha=arguments.alpha,
        down_proj=not arguments.no_smooth_down_proj,
        batch_tokens=arguments.batch_tokens,
        max_evaluations=arguments.max_evaluations,
        version=arguments.policy_version,
        force=arguments.force,
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit code 2 for what was asked wrongly, 1 for what failed on the way."""
    from rich.console import Console

    from forge_ptq.artifact import ArtifactError
    from forge_ptq.commands.inspect import show
    from forge_ptq.inspection import load
    from forge_ptq.numerics.plan import PlanError
    from forge_ptq.numerics.schemes import QuantizationError
    from forge_ptq.offline import JobError, check, quantize
    from forge_ptq.rollouts_file import RolloutFileError

    try:
        job = job_of(arguments)
        inputs = check(job)
    except (JobError, RolloutFileError, PlanError) as error:
        print(error, file=sys.stderr)
        return 2
    console = Console()
    counts = [len(inputs.calibration), len(inputs.plan), len(inputs.held_out)]
    console.print(
        f"rollouts: {counts[0]} calibrate, {counts[1]} decide the plan, {counts[2]} held out",
        highlight=False,
    )
    if not inputs.held_out:
        console.print(
            "[yellow]warning: fewer than four prompts, so none is held out and no perplexity rise "
            "is measured[/]",
            highlight=False,
        )
    try:
        with progress(console) as report:
            result = quantize(job, inputs, report)
        summary = load(result.folder)
    except (QuantizationError, ArtifactError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    show(summary, console)
    if not result.within_budget:
        console.print("[yellow]no plan stays within the budget; this is the best one found[/]")
    if result.measured is not None:
        low, high = result.measured.ci
        console.print(
            f"measured on {result.measured.tokens} held-out response tokens: perplexity "
            f"{result.measured.rise:+.2%} [{low:+.2%}, {high:+.2%}], simulated with the served "
            "integers",
            highlight=False,
        )
    console.print(f"written to {result.folder}", highlight=False)
    return 0


@contextmanager
def progress(console: Console) -> Iterator[Report]:
    """A function for ``quantize`` that shows one bar per stage; in a log, one line per stage."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if not console.is_terminal:
        begun: set[str] = set()

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in begun:
                begun.add(stage)
                console.print(f"{stage} ...", highlight=False)

        yield tell
        return
    columns = (
        TextColumn("{task.description:>16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report
