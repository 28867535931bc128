"""Training checkpoints that are there completely or not at all.

    folder/
      step-00000040/      files of torch.distributed.checkpoint, state.json; always complete
      step-00000060/
      LATEST              name of the newest; a hint for people, never trusted
      .writing-…          a save that is under way, or that died; removed by the next save

All ranks write into `.writing-step-N`, files are synced, then rank 0 renames it to `step-N`. A
rename is atomic, so a process killed at any moment leaves either no `step-N` or a whole one. A save
that fails, as on a full disk, fails on every rank and leaves what was there before.
Resuming takes the highest `step-N` that holds its metadata.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

LATEST = "LATEST"
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8})$")


class SaveError(RuntimeError):
    """A checkpoint that could not be written; the ones before it are as they were."""


class DamagedCheckpointError(RuntimeError):
    """A checkpoint that was complete once and cannot be read."""


class TidyError(RuntimeError):
    """A checkpoint that is saved, complete and resumed from, after which something was not done:
    LATEST is an old one, or older checkpoints are still there. The next save does it."""


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
    SaveError if it is not saved, TidyError if it is but not what comes after, on every rank, with
    the cause on the rank that met it.
    """
    final = path_of(folder, step)
    writing = folder / f".writing-{final.name}"
    text = json.dumps({**state, "step": step})

    def clear() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".writing-*"):
            shutil.rmtree(leftover)

    def finish() -> None:
        write_text(writing / STATE, text)
        sync(writing)
        writing.rename(final)
        sync(folder)

    def tidy() -> None:
        write_text(folder / LATEST, final.name + "\n")
        for old in complete_steps(folder)[:-keep] if keep > 0 else []:
            _remove(path_of(folder, old))
        clear()

    if step in complete_steps(folder):
        _barrier()  # every rank has looked before anything changes
        _on_rank_0(lambda: write_text(final / STATE, text), final)
        return final
    _on_rank_0(clear, final)
    try:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(writing, sync_files=True))
    except dcp.CheckpointException as error:  # torch raises it on every rank
        if _is_rank_0():
            shutil.rmtree(writing, ignore_errors=True)  # the disk may be full of it
        causes = [f"rank {n}: {type(e).__name__}: {e}" for n, (e, _) in error.failures.items()]
        raise SaveError(f"{final}: {', '.join(causes)}; {_free(folder)}") from error
    _on_rank_0(finish, final)
    _on_rank_0(tidy, final, TidyError)
    return final


def load(folder: Path, step: int, tensors: dict[str, Any]) -> dict[str, Any]:
    """Reads the checkpoint of `step` into `tensors`, in place; returns its state.json.

    DamagedCheckpointError if it cannot be read. Another one is not tried: which steps of training
    to give up is for the user to say.
    """
    path = path_of(folder, step)
    try:
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path))
        return json.loads((path / STATE).read_text())
    except (Exception, dcp.api.CheckpointException) as error:  # the latter is a BaseException
        older = [s for s in complete_steps(folder) if s < step]
        then = f"resume from step {older[-1]}" if older else "start anew"
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise DamagedCheckpointError(
            f"the checkpoint {path} cannot be read; remove this folder to {then} ({cause[-1]})"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Replaces a small file at once: readers see the old text or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _remove(path: Path) -> None:
    """Removes a checkpoint so that a crash half-way leaves nothing that looks like one."""
    doomed = path.with_name(f".writing-removed-{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _on_rank_0(
    action: Callable[[], None], final: Path, failure: type[RuntimeError] = SaveError
) -> None:
    """Runs `action` on rank 0 while the others wait; `failure` on all of them if it fails."""
    problem: list[str | None] = [None]
    if _is_rank_0():
        try:
            action()
        except OSError as error:
            problem = [f"rank 0: {type(error).__name__}: {error}; {_free(final.parent)}"]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise failure(f"{final}: {problem[0]}")


def _free(folder: Path) -> str:
    """What torch does not say when a disk is full."""
    return f"{shutil.disk_usage(folder).free / 2**20:.0f} MB are free in {folder}"


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
