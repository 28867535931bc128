"""`forge-ptq inspect DIR`: plan, scales and sizes of an artifact or a compressed-tensors folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from forge_ptq.artifact import CalibrationRecord, Manifest
    from forge_ptq.inspection import Spread, Summary


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "inspect",
        help="show plan, scales and sizes of a quantized checkpoint or artifact",
        description="Verifies every tensor against its hash, then shows what is in there.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--layers", action="store_true", help="one line per layer")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 for a directory that is damaged or not an artifact."""
    from rich.console import Console

    from forge_ptq.artifact import ArtifactError
    from forge_ptq.inspection import load, summarize

    try:
        artifact, form = load(arguments.directory)
    except (ArtifactError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    show(summarize(artifact, form), Console(), layers=arguments.layers)
    return 0


def show(summary: Summary, console: Console, *, layers: bool = False) -> None:
    """Print a summary."""
    manifest = summary.artifact.manifest
    smaller = summary.full_nbytes / manifest.nbytes
    console.print(
        f"[bold]{manifest.model}[/] as {summary.form}, policy version {manifest.policy_version}, "
        f"artifact {manifest.artifact_id}",
        highlight=False,
    )
    console.print(
        f"{_bytes(manifest.nbytes)} in {len(manifest.tensors)} tensors, every hash verified; "
        f"{smaller:.2f} times smaller than in bf16",
        highlight=False,
    )
    console.print(_classes(summary))
    shares = ", ".join(f"{scheme} {share:.1%}" for scheme, share in summary.shares.items())
    console.print(f"share of linear FLOPs: {shares} (lm_head not counted)", highlight=False)
    for line in _calibration(manifest.calibration):
        console.print(line, highlight=False)
    if layers:
        console.print(_layers(summary))
    else:
        for name, note in _differences(manifest).items():
            console.print(f"{name}: {note}", highlight=False)


def _classes(summary: Summary) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("class")
    table.add_column("scheme")
    for column in ("layers", "FLOPs", "size", "weight scales", "input scales"):
        table.add_column(column, justify="right")
    total = sum(row.weights for row in summary.rows) or 1
    for row in summary.rows:
        table.add_row(
            row.kind,
            row.scheme,
            str(row.layers),
            f"{row.weights / total:.1%}",
            _bytes(row.nbytes),
            _spread(row.weight_scale),
            _spread(row.input_scale) if row.input_scale else _inputs(row.scheme),
        )
    return table


def _layers(summary: Summary) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("layer", "scheme", "input scale", "note"):
        table.add_column(column, justify="right" if column == "input scale" else "left")
    artifact = summary.artifact
    differences = _differences(artifact.manifest)
    for name, scheme in artifact.manifest.layers.items():
        scale = artifact.tensors.get(f"{name}.input_scale")
        shown = _inputs(scheme) if scale is None else f"{float(scale):.3g}"
        table.add_row(name, scheme, shown, differences.get(name, ""))
    return table


def _differences(manifest: Manifest) -> dict[str, str]:
    """Layer -> why its scheme is not the one the plan asked for."""
    differences = {
        name: f"{scheme} instead of {manifest.asked[name]}"
        for name, scheme in manifest.layers.items()
        if manifest.asked.get(name, scheme) != scheme
    }
    return differences | dict(manifest.notes)


def _calibration(record: CalibrationRecord | None) -> list[str]:
    if record is None:
        return ["no calibration: nothing in here depends on measured inputs"]
    people = ", ".join(record.contributors) or "unknown"
    lines = [
        f"calibration round {record.round} on policy version {record.policy_version}: "
        f"{record.tokens} tokens, ranges by {record.range_method}, by {people}"
    ]
    if record.dropped:
        lines.append(f"left out: {'; '.join(record.dropped)}")
    if record.smoothing:
        values = sorted(record.smoothing.values())
        lines.append(
            f"smoothed inputs: {len(values)}, alpha {values[0]:g} to {values[-1]:g}, "
            f"median {values[len(values) // 2]:g}"
        )
    rises = {
        "budget": record.budget,
        "of the plan": record.predicted_rise,
        "on held-out rollouts": record.measured_rise,
    }
    known = [f"{name} {value:+.2%}" for name, value in rises.items() if value is not None]
    if known:
        lines.append(f"perplexity rise: {', '.join(known)}")
    return lines


def _inputs(scheme: str) -> str:
    return "per token" if scheme == "int8_dynamic" else "-"


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{spread.low:.2e} / {spread.median:.2e} / {spread.high:.2e}"


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"
