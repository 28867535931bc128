"""What a configuration names must exist: the task in its package, layers in the checkpoint.

Slower than `check` (a package is imported, a file is opened), so it is a step of its own, before
anything starts. What is not on this machine (a model on the hub) is not checked.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from forge_ptq.numerics.plan import PlanError, QuantPlan

from .build import Problems, closest
from .schema import RunConfig

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def check_assets(config: RunConfig) -> Problems:
    """(key path, message) for every name that nothing has."""
    problems: Problems = []
    _task(config.dataset.task, problems)
    names = linear_names(Path(config.model))
    if names and config.ptq.enabled:
        plan = config.ptq.plan
        try:
            QuantPlan.from_config(plan.default, plan.overrides).resolve(names)
        except PlanError as error:
            problems.append((f"ptq.{error.key or 'plan.overrides'}", error.reason))
    return problems


def _task(task: str, problems: Problems) -> None:
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = closest(task, list(DATASETS))
        hint = f"; did you mean {near}?" if near else ""
        problems.append(("dataset.task", f"reasoning-gym has no task {task!r}{hint}"))


def linear_names(folder: Path) -> list[str]:
    """Modules of a checkpoint folder that have a matrix as weight, sorted; empty where there is no
    safetensors file. Only headers are read."""
    index = folder / INDEX
    if index.is_file():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        paths = [folder / name for name in sorted(files)]
    else:
        paths = [folder / SINGLE]
    names: list[str] = []
    for path in paths:
        if path.is_file():
            for key, entry in _header(path).items():
                if key.endswith(".weight") and len(entry["shape"]) == 2:
                    names.append(key.removesuffix(".weight"))
    return sorted(names)


def _header(path: Path) -> dict[str, dict[str, list[int]]]:
    """The JSON at the start of a safetensors file; its length comes first, 8 bytes."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header
