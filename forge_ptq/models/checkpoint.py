"""Hugging Face checkpoint folders: read, and write so that a reader never sees half of one.

A folder is written beside its target and renamed into place as the last act. What a process that
was killed left beside it is removed, or put back, by the next one that writes the same target.
`complete.json` inside names what the folder was made from: a maker that finds its own fingerprint
there has nothing to do.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

COMPLETE = "complete.json"
"""Marker file of a finished folder: {"fingerprint": str, ...}."""


def fingerprint(what: Mapping[str, Any]) -> str:
    """Hash of a JSON-like description of how a folder is made."""
    text = json.dumps(what, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def marker(folder: str | Path) -> dict[str, Any] | None:
    """The marker of a finished folder; None where the folder is missing or unfinished."""
    path = Path(folder) / COMPLETE
    if not path.is_file():
        return None
    with contextlib.suppress(json.JSONDecodeError):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
    return None


def is_current(folder: str | Path, fingerprint_: str) -> bool:
    """True where `folder` is finished and was made from exactly this description."""
    found = marker(folder)
    return found is not None and found.get("fingerprint") == fingerprint_


def write_folder(
    target: str | Path, fill: Callable[[Path], object], info: Mapping[str, Any]
) -> Path:
    """Calls `fill(temporary folder)`, adds the marker with `info`, renames it to `target`.

    A `target` made by this function (or empty) is replaced; anything else is not ours to delete:
    FileExistsError before any work. Through a symbolic link the folder it points to is written.
    A process that is killed leaves at most a `.partial-*` folder beside it, see ``_tidy``.
    """
    asked, target = Path(target), Path(target)
    if target.is_symlink():
        target = target.resolve()
    made = [parent for parent in target.parents if not parent.exists()]  # the innermost first
    target.parent.mkdir(parents=True, exist_ok=True)
    _tidy(target)
    require_replaceable(target)
    partial, old = _beside(target, "partial"), _beside(target, "old")
    try:
        partial.mkdir()
        fill(partial)
        (partial / COMPLETE).write_text(json.dumps(dict(info), indent=2, sort_keys=True) + "\n")
        _sync(partial)
        if target.exists():
            target.rename(old)
        partial.rename(target)
    finally:
        if old.exists() and not target.exists():  # stopped between the two renames
            old.rename(target)
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
        if not target.exists():
            with contextlib.suppress(OSError):  # somebody else has put something there
                for parent in made:
                    parent.rmdir()
    return asked


def _beside(target: Path, kind: str) -> Path:
    """A new name beside `target` that says which process it belongs to."""
    owner = f"{uuid.uuid4().hex[:8]}-{os.getpid()}@{socket.gethostname()}"
    return target.parent / f".{kind}-{target.name}-{owner}"


def _tidy(target: Path) -> None:
    """Undo what processes of this host that are dead left beside `target`."""
    for kind in ("old", "partial"):
        prefix = f".{kind}-{target.name}-"
        for path in sorted(target.parent.iterdir()):
            if not path.name.startswith(prefix) or not _orphaned(path.name.removeprefix(prefix)):
                continue
            if kind == "old" and not target.exists():
                path.rename(target)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _orphaned(owner: str) -> bool:
    """Whether the process that made this name, see ``_beside``, was of this host and is dead."""
    match = re.fullmatch(r"[0-9a-f]{8}-(\d+)@(.+)", owner)
    if match is None or match[2] != socket.gethostname():
        return False
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it lives, and is somebody else's
        return False
    return False


def require_replaceable(target: str | Path) -> None:
    """Raises FileExistsError where `target` is a file, or a folder with files that are not ours."""
    target = Path(target)
    if not target.exists() or (target / COMPLETE).is_file():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise FileExistsError(
            f"{target}: exists and is no checkpoint made here (it has no {COMPLETE}); expected a "
            "new or empty folder, or such a checkpoint"
        )


def _sync(folder: Path) -> None:
    """Forces a folder's files to disk, so that a rename never outlives their contents."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as handle:
                os.fsync(handle.fileno())


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint folder.

    FileNotFoundError says how to get one, ValueError names a file that is not a JSON object.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} not found: expected a Hugging Face checkpoint folder. Make the tiny "
            "policy with `python -m apps.sft.main --config configs/sft_tiny_cpu.yaml`, SmolLM2 "
            "with `python -m forge_ptq.models.smollm2 --out models/smollm2_135m`."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected an object, got {type(config).__name__}")
    return config


def iter_tensors(folder: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor in the folder's safetensors files, one at a time."""
    from safetensors import safe_open

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors file in {folder}")
    for file in files:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - not a dict
                yield name, handle.get_tensor(name)


def save_tensors(folder: str | Path, state: Mapping[str, torch.Tensor]) -> None:
    """Writes model.safetensors: HF names, whole (not sharded) tensors."""
    from safetensors.torch import save_file

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(plain, Path(folder) / "model.safetensors", metadata={"format": "pt"})


def local_folder(name: str | Path) -> Path:
    """The folder of a checkpoint: a path as it is; `hf://ORG/NAME` is downloaded from the hub."""
    text = str(name)
    if text.startswith("hf://"):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(text.removeprefix("hf://")))
    return Path(text)


def copy_assets(source: str | Path, target: str | Path) -> None:
    """Copies everything of a checkpoint folder but its weights: config, tokenizer, template."""
    for path in Path(source).iterdir():
        keep = path.suffix in {".json", ".jinja", ".txt", ".model"}
        if path.is_file() and keep and path.name not in {COMPLETE, "model.safetensors.index.json"}:
            shutil.copyfile(path, Path(target) / path.name)
