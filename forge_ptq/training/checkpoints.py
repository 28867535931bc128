"""Training checkpoints that are there completely or not at all.

    folder/
      step-00000040/      files of torch.distributed.checkpoint, state.json; always complete
      step-00000060/
      LATEST              name of the newest; a hint for people, never trusted
      .writing-…          a save that is under way, or that died; removed by the next save

All ranks write into `.writing-step-N`, files are synced, then rank 0 renames it to `step-N`. A
rename is atomic, so a process killed at any moment leaves either no `step-N` or a whole one.
Resuming takes the highest `step-N` that holds its metadata.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

LATEST = "LATEST"
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8})$")


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is, or would be."""
    return folder / f"step-{step:08d}"


def complete_steps(folder: Path) -> list[int]:
    """Steps of all complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        match = _NAME.match(path.name)
        if match and (path / ".metadata").is_file() and (path / STATE).is_file():
            found.append(int(match.group(1)))
    return sorted(found)


def save(
    folder: Path, step: int, tensors: dict[str, Any], state: dict[str, Any], keep: int
) -> Path:
    """Writes the checkpoint of `step`; all ranks call it together. Returns its folder.

    `tensors` goes to torch.distributed.checkpoint, `state` (JSON) to state.json. Afterwards all but
    the newest `keep` are removed; 0 keeps all. Where the step is saved already only its state is
    written anew: its tensors are the same, and taking it away first would risk having none.
    """
    final = path_of(folder, step)
    writing = folder / f".writing-{final.name}"
    leader = not dist.is_initialized() or dist.get_rank() == 0
    if step in complete_steps(folder):
        _barrier()  # every rank has looked before anything changes
        if leader:
            write_text(final / STATE, json.dumps({**state, "step": step}))
        return final
    if leader:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".writing-*"):
            shutil.rmtree(leftover)
    _barrier()
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(writing, sync_files=True))
    if leader:
        write_text(writing / STATE, json.dumps({**state, "step": step}))
        _sync_folder(writing)
        writing.rename(final)
        _sync_folder(folder)
        write_text(folder / LATEST, final.name + "\n")
        if keep > 0:
            for old in complete_steps(folder)[:-keep]:
                _remove(path_of(folder, old))
        for leftover in folder.glob(".writing-*"):
            shutil.rmtree(leftover)
    _barrier()
    return final


def load(folder: Path, step: int, tensors: dict[str, Any]) -> dict[str, Any]:
    """Reads the checkpoint of `step` into `tensors`, in place; returns its state.json."""
    path = path_of(folder, step)
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path))
    return json.loads((path / STATE).read_text())


def write_text(path: Path, text: str) -> None:
    """Replaces a small file at once: readers see the old text or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    partial.rename(path)


def _remove(path: Path) -> None:
    """Removes a checkpoint so that a crash half-way leaves nothing that looks like one."""
    doomed = path.with_name(f".writing-removed-{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
