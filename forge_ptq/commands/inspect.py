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
        description="Verifies every tensor against its hash, where there is a manifest with "
        "hashes, then shows what is in there.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--layers", action="store_true", help="one line per layer")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 for a directory that is damaged or not an artifact."""
    from rich.console import Console

    from forge_ptq.artifact import ArtifactError
    from forge_ptq.inspection import load

    try:
        summary = load(arguments.directory)
    except (ArtifactError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    show(summary, Console(), layers=arguments.layers)
    return 0


def show(summary: Summary, console: Console, *, layers: bool = False) -> None:
    """Print a summary."""
    manifest = summary.artifact.manifest
    smaller = summary.full_nbytes / manifest.nbytes
    origin = f", policy version {manifest.policy_version}, artifact {manifest.artifact_id}"
    console.print(
        f"[bold]{manifest.model}[/] as {summary.form}{origin if summary.verified else ''}",
        highlight=False,
    )
    if not summary.verified:
        console.print(
            "[yellow]no manifest: nothing was verified against hashes[/]; names, shapes and dtypes "
            "fit together",
            highlight=False,
        )
    hashes = ", every hash verified" if summary.verified else ""
    console.print(
        f"{_bytes(manifest.nbytes)} in {len(manifest.tensors)} tensors{hashes}; "
        f"{smaller:.2f} times smaller than in bf16",
        highlight=False,
    )
    console.print(_classes(summary))
    shares = ", ".join(f"{scheme} {share:.1%}" for scheme, share in summary.shares.items())
    console.print(f"share of linear FLOPs: {shares} (lm_head not counted)", highlight=False)
    known = _calibration(manifest.calibration) if summary.verified else []
    for line in known or ["calibration unknown: there is no manifest"]:
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
    for column in ("class", "scheme"):  # in a narrow terminal the scales are wrapped, names are not
        table.add_column(column, no_wrap=True)
    for column in ("layers", "FLOPs", "size"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("weight scales", "input scales"):
        table.add_column(column, justify="right", overflow="fold")
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
    table.add_column("layer", overflow="fold")
    table.add_column("scheme", no_wrap=True)
    table.add_column("input scale", justify="right")
    table.add_column("note")
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
    if record is None or not record.tokens:
        lines = ["no calibration: nothing in here depends on measured inputs"]
        return lines if record is None else lines + _rises(record)
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
    return lines + _rises(record)


def _rises(record: CalibrationRecord) -> list[str]:
    rises = {
        "budget": record.budget,
        "of the plan": record.predicted_rise,
        "on held-out rollouts": record.measured_rise,
    }
    known = [f"{name} {value:+.2%}" for name, value in rises.items() if value is not None]
    return [f"perplexity rise: {', '.join(known)}"] if known else []


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
