"""What a resumed run needs beside the trainer's checkpoint, saved next to it.

    checkpoint/
      step-00000040/              the trainer's (training/checkpoints.py)
      guard-00000040-0001/        a guard state of that step; complete if it is there
        artifact/                 the artifact that served (artifact.py), missing if none did
        calibration.safetensors   the live calibration with its merged statistics, missing if none
        state.json                all the rest, and the hashes; written last
      .guard-…                    a save or a removal that is under way, or that died

A guard state is written into a `.guard-` folder, synced, and renamed: a process killed at any
moment leaves either none or a whole one. What serves when the trainer saves is a version older than
what it saved, so a step gets a second guard state once that version has been published: the higher
number counts.

Guard states go with the trainer's checkpoints: kept is whatever some checkpoint would resume from,
the newest guard state not newer than it. Whoever resumes removes the later ones (``forget_after``):
they belong to steps that are about to be trained anew, with other weights.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_ptq.artifact import ArtifactError, QuantizedArtifact
from forge_ptq.manifest import ArtifactRef
from forge_ptq.numerics.calibration import Calibration, CalibrationFormatError
from forge_ptq.training import checkpoints

SCHEMA = 1
STATE, CALIBRATION, ARTIFACT = "state.json", "calibration.safetensors", "artifact"
_NAME = re.compile(r"guard-(\d{8})-(\d{4})$")
_UNFINISHED = ".guard-*"

Log = Callable[[str], None]


class GuardStateError(ValueError):
    """A guard state that cannot be read or is not what was written."""


@dataclass(frozen=True)
class GuardState:
    """Everything beside the trainer's checkpoint of ``step``."""

    step: int
    publisher: Mapping[str, Any] = field(default_factory=dict)
    """PTQ.state(): what the publisher remembers between publishes. JSON only."""
    calibration: Calibration | None = None
    """The live one."""
    artifact: QuantizedArtifact | None = None
    """What serves; None for the starting checkpoint."""

    @property
    def ref(self) -> ArtifactRef | None:
        """Of the artifact."""
        return None if self.artifact is None else self.artifact.manifest.ref


def found(folder: Path) -> list[tuple[int, int]]:
    """(step, number) of all guard states in a folder of checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    matches = (_NAME.match(path.name) for path in folder.iterdir())
    return sorted((int(m.group(1)), int(m.group(2))) for m in matches if m)


def path_of(folder: Path, key: tuple[int, int]) -> Path:
    """Where the guard state (step, number) is."""
    return folder / f"guard-{key[0]:08d}-{key[1]:04d}"


def save(folder: Path, state: GuardState) -> Path:
    """Write a guard state and remove those that no checkpoint needs any more; returns its folder.

    Blocks on the disk. OSError (or safetensors' error) if that does not take it: what was there
    before stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(folder)
    same = [number for step, number in found(folder) if step == state.step]
    final = path_of(folder, (state.step, max(same, default=0) + 1))
    writing = folder / f".{final.name}"
    try:
        writing.mkdir()
        _write(writing, state)
        writing.rename(final)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    checkpoints.sync(folder)
    prune(folder)
    return final


def _write(path: Path, state: GuardState) -> None:
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "step": state.step,
        "publisher": dict(state.publisher),
        "calibration": None,
        "artifact": None,
    }
    if state.calibration is not None:
        from safetensors.torch import save_file

        tensors, text = state.calibration.to_tensors()
        file = path / CALIBRATION
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(file))
        checkpoints.sync(file)
        record["calibration"] = {"text": text, "sha256": _sha256(file)}
    if state.artifact is not None:
        state.artifact.save(path / ARTIFACT)
        manifest = state.artifact.manifest
        record["artifact"] = [manifest.artifact_id, manifest.policy_version]
    body = json.dumps(record, allow_nan=False)
    sealed = {"sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body}
    checkpoints.write_text(path / STATE, json.dumps(sealed))
    checkpoints.sync(path)


def load(folder: Path, key: tuple[int, int]) -> GuardState:
    """Read and verify the guard state (step, number); GuardStateError says what is wrong."""
    path = path_of(folder, key)
    try:
        record = _unsealed(path / STATE)
        if record["schema"] != SCHEMA or record["step"] != key[0]:
            raise GuardStateError(
                f"{path / STATE}: schema {record['schema']} of step {record['step']}, expected "
                f"schema {SCHEMA} of step {key[0]}"
            )
        calibration = _calibration(path, record["calibration"])
        artifact = None
        if record["artifact"] is not None:
            artifact = QuantizedArtifact.load(path / ARTIFACT)
            ref = ArtifactRef(*record["artifact"])
            if artifact.manifest.ref != ref:
                raise GuardStateError(f"{path / ARTIFACT}: {artifact.manifest.ref}, expected {ref}")
        return GuardState(key[0], record["publisher"], calibration, artifact)
    except GuardStateError:
        raise
    except (ArtifactError, CalibrationFormatError, OSError) as error:
        raise GuardStateError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise GuardStateError(f"{path / STATE}: not a guard state: {error!r}") from error


def _unsealed(path: Path) -> dict[str, Any]:
    sealed = json.loads(path.read_text(encoding="utf-8"))
    if hashlib.sha256(sealed["body"].encode()).hexdigest() != sealed["sha256"]:
        raise GuardStateError(f"{path}: its contents do not match their sha256")
    return json.loads(sealed["body"])


def _calibration(path: Path, record: Mapping[str, Any] | None) -> Calibration | None:
    if record is None:
        return None
    from safetensors.torch import load_file

    file = path / CALIBRATION
    if _sha256(file) != record["sha256"]:
        raise GuardStateError(f"{file}: its contents do not match their sha256")
    return Calibration.from_tensors(load_file(str(file)), record["text"])


def newest(folder: Path, step: int, log: Log) -> GuardState | None:
    """The newest guard state not newer than ``step`` that can be read; ``log`` is told of every
    damaged one that is passed over."""
    for key in reversed(found(folder)):
        if key[0] > step:
            continue
        try:
            return load(folder, key)
        except GuardStateError as error:
            log(f"the guard state {path_of(folder, key).name} is not used: {error}")
    return None


def forget_after(folder: Path, step: int) -> None:
    """Remove guard states of later steps, and what unfinished saves left."""
    _remove_unfinished(folder)
    for key in found(folder):
        if key[0] > step:
            _remove(folder, key)


def prune(folder: Path) -> None:
    """Remove what no checkpoint of the trainer, present or next, would resume from."""
    steps, keys = checkpoints.complete_steps(folder), found(folder)
    needed = {max((k for k in keys if k[0] <= step), default=None) for step in steps}
    for key in keys[:-1]:  # the newest may be there before the checkpoint it belongs to
        if key not in needed:
            _remove(folder, key)


def _remove(folder: Path, key: tuple[int, int]) -> None:
    """So that a crash half-way leaves nothing that looks like a guard state."""
    path = path_of(folder, key)
    doomed = path.with_name(f".guard-removed-{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _remove_unfinished(folder: Path) -> None:
    for leftover in folder.glob(_UNFINISHED):
        shutil.rmtree(leftover)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- to and from a run ---- #


@dataclass(frozen=True)
class Snapshot:
    """What the publisher held at one moment; the artifact's tensors are fetched afterwards."""

    step: int
    publisher: Mapping[str, Any]
    calibration: Calibration | None
    ref: ArtifactRef | None

    async def complete(self) -> GuardState:
        """Fetch the artifact from the store; StoreError if it is gone."""
        from forge_ptq import store

        artifact = None if self.ref is None else await store.get_artifact(self.ref)
        return GuardState(self.step, self.publisher, self.calibration, artifact)


async def snapshot(ptq: Any, step: int) -> Snapshot:
    """Of a services.ptq.PTQ between two publishes. StoreError if the store does not answer."""
    from forge_ptq import store

    publisher = json.loads(json.dumps(ptq.state(), allow_nan=False))  # as of now
    return Snapshot(step, publisher, ptq.fleet.calibration, await store.get_committed())


async def restore(state: GuardState, oldest: int) -> ArtifactRef | None:
    """Put a guard state into a fresh store, before generators and quantizers start from it.

    The artifact only if its version is at least ``oldest``, and not newer than the checkpoint, as
    after a rollback beyond it, and if it has not failed its probation; returns its reference if it
    is now the committed one.
    """
    from forge_ptq import store, store_stats

    if state.calibration is not None:
        await store_stats.put_calibration(state.calibration)
        await store_stats.continue_rounds(state.calibration.round)
    if state.artifact is None:
        return None
    if not oldest <= state.artifact.manifest.policy_version <= state.step:
        return None
    if state.artifact.manifest.artifact_id in state.publisher.get("ladder", {}).get("banned", {}):
        return None
    ref = await store.put_artifact(state.artifact)
    await store.set_committed(ref)
    return ref
