"""Guard states on disk: whole or not there, the right one found, a damaged one passed over."""

import json
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_ptq import guard_state
from forge_ptq.artifact import QuantizedArtifact
from forge_ptq.guard_state import GuardState, GuardStateError
from forge_ptq.numerics.calibration import Calibration
from forge_ptq.numerics.schemes import get_scheme
from forge_ptq.numerics.stats import measure
from forge_ptq.training import checkpoints

PUBLISHER = {"demoted": {"x.down_proj": 1}, "rolled_back": ["v3-a"], "share": 0.25}


def newest(folder: Path, step: int) -> Any:
    """None of them may be damaged."""
    return guard_state.newest(folder, step, pytest.fail)


def make(step: int, version: int | None = None) -> Any:
    parts = get_scheme("int8_static").quantize(torch.randn(3, 5), absmax=1.0)
    artifact = QuantizedArtifact.build(
        policy_version=step if version is None else version,
        model="m",
        layers={"x": "int8_static"},
        tensors={f"x.{part}": tensor for part, tensor in parts.items()},
    )
    calibration = Calibration(
        round=step,
        policy_version=step,
        layers={"x": "int8_static"},
        absmax={"x": 2.5},
        shift={"x": torch.tensor([0, -3, 2, 0, 1], dtype=torch.int8)},
        stats={"x": measure(torch.randn(7, 5))},
        tokens=7,
    )
    return GuardState(step, PUBLISHER, calibration, artifact)


def trainer_checkpoint(folder: Path, step: int) -> None:
    path = checkpoints.path_of(folder, step)
    path.mkdir(parents=True, exist_ok=True)
    (path / ".metadata").touch()
    (path / checkpoints.STATE).write_text("{}")


def save(folder: Path, step: int, version: int | None = None) -> Path:
    """A guard state beside the trainer's checkpoint of the step."""
    trainer_checkpoint(folder, step)
    return guard_state.save(folder, make(step, version))


def test_everything_comes_back(tmp_path):
    state = make(40, version=39)
    path = guard_state.save(tmp_path, state)
    assert {file.suffix for file in path.rglob("*") if file.is_file()} == {".json", ".safetensors"}
    found = newest(tmp_path, 40)
    assert found is not None
    assert (found.step, found.publisher) == (40, PUBLISHER)
    assert found.artifact.manifest == state.artifact.manifest
    for name, tensor in state.artifact.tensors.items():
        assert torch.equal(found.artifact.tensors[name], tensor)
    assert found.calibration.to_tensors()[1] == state.calibration.to_tensors()[1]
    for name, tensor in state.calibration.to_tensors()[0].items():
        assert torch.equal(found.calibration.to_tensors()[0][name], tensor)


def test_nothing_serves_and_nothing_is_calibrated(tmp_path):
    guard_state.save(tmp_path, GuardState(2))
    found = newest(tmp_path, 2)
    assert found == GuardState(2)
    assert found.ref is None


def test_the_newest_that_is_not_newer_than_the_trainer(tmp_path):
    for step, version in ((2, 1), (4, 3), (4, 4), (6, 5)):
        save(tmp_path, step, version)
    found = newest(tmp_path, 5)
    assert (found.step, found.ref.policy_version) == (4, 4)
    assert newest(tmp_path / "none", 5) is None
    assert newest(tmp_path, 1) is None


def test_they_go_with_the_checkpoints(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step, step - 1)
        save(tmp_path, step)
    assert guard_state.found(tmp_path) == [(2, 2), (4, 2), (6, 2)]
    shutil.rmtree(checkpoints.path_of(tmp_path, 2))
    guard_state.prune(tmp_path)
    assert guard_state.found(tmp_path) == [(4, 2), (6, 2)]
    shutil.rmtree(checkpoints.path_of(tmp_path, 4))
    trainer_checkpoint(tmp_path, 5)  # its own guard state could not be saved
    guard_state.prune(tmp_path)
    assert guard_state.found(tmp_path) == [(4, 2), (6, 2)]


def test_later_steps_are_forgotten_on_resume(tmp_path):
    for step in (2, 4):
        save(tmp_path, step)
    (tmp_path / ".guard-00000006-0001").mkdir()
    guard_state.forget_after(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "guard-00000002-0001", "step-00000002", "step-00000004",
    ]  # fmt: skip


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize(
    "file",
    ["state.json", "calibration.safetensors", "artifact/tensors.safetensors",
     "artifact/manifest.json"],
)  # fmt: skip
def test_a_damaged_one_is_passed_over_and_named(tmp_path, file, damage):
    save(tmp_path, 2)
    damage(save(tmp_path, 4) / file)
    with pytest.raises(GuardStateError):
        guard_state.load(tmp_path, (4, 1))
    told: list[str] = []
    found = guard_state.newest(tmp_path, 9, told.append)
    assert found is not None
    assert found.step == 2
    assert len(told) == 1
    assert "guard-00000004-0001 is not used" in told[0]


def test_one_of_another_step_or_schema(tmp_path):
    path = save(tmp_path, 4)
    path.rename(guard_state.path_of(tmp_path, (5, 1)))
    with pytest.raises(GuardStateError, match="of step 4, expected schema 1 of step 5"):
        guard_state.load(tmp_path, (5, 1))


def in_child(action) -> int:
    """Exit status of a forked child that runs it: 0, 1 for an exception, -9 if killed."""
    pid = os.fork()
    if not pid:
        try:
            action()
            os._exit(0)
        except BaseException:  # noqa: BLE001  (the parent asks how it ended)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("limit", [0, 100, 1500])
def test_a_full_disk_leaves_what_was_there(tmp_path, limit):
    save(tmp_path, 2)

    def on_a_full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        guard_state.save(tmp_path, make(4))

    assert in_child(on_a_full_disk) == 1
    assert guard_state.found(tmp_path) == [(2, 1)]
    assert not list(tmp_path.glob(".guard-*"))
    assert newest(tmp_path, 9).step == 2
    guard_state.save(tmp_path, make(4))
    assert newest(tmp_path, 9).step == 4


def test_killed_at_every_operation_on_files(tmp_path):
    """Dies at the n-th operation: afterwards the old state can be read, or the new one."""
    import sys

    events = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}
    origin = tmp_path / "origin"
    save(origin, 2, version=1)
    steps = set()
    for n in range(1, 200):
        folder = tmp_path / f"kill-{n}"
        shutil.copytree(origin, folder)

        def save_and_die(folder: Path = folder, n: int = n) -> None:
            count = 0

            def hook(event: str, args: tuple[object, ...]) -> None:
                nonlocal count
                if event in events and str(args[0] if args else "").startswith(str(folder)):
                    count += 1
                    if count == n:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            guard_state.save(folder, make(2))

        status = in_child(save_and_die)
        assert status in (0, -signal.SIGKILL)
        found = newest(folder, 2)
        assert found is not None, n
        steps.add(found.ref.policy_version)
        guard_state.save(folder, make(2, version=3))  # whatever was left is no hindrance
        assert newest(folder, 2).ref.policy_version == 3
        if status == 0:
            break
    assert n > 10
    assert steps == {1, 2}


def test_a_snapshot_is_json(tmp_path):
    path = guard_state.save(tmp_path, make(4))
    sealed = json.loads((path / "state.json").read_text())
    assert json.loads(sealed["body"])["publisher"] == PUBLISHER
