"""Child of test_trainer: saves step 3 over step 2 and dies at the n-th file-system operation.

Prints one JSON line per n: exit status of the saver, newest complete step, the values in it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

import torch

from forge_ptq.training import checkpoints

EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((4,), value) for name in ("a", "b", "c")}


def save_and_die(folder: Path, n: int) -> int:
    """Exit status of a child that saves step 3 and kills itself at operation n."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    count = 0

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal count
        if event not in EVENTS or not str(args[0] if args else "").startswith(str(folder)):
            return
        count += 1
        if count == n:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    checkpoints.save(folder, 3, tensors(3.0), {}, keep=1)
    os._exit(0)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    base = Path(sys.argv[1])
    origin = base / "origin"
    checkpoints.save(origin, 2, tensors(2.0), {}, keep=1)
    for n in range(1, 500):
        folder = base / f"kill-{n}"
        shutil.copytree(origin, folder)
        status = save_and_die(folder, n)
        step = checkpoints.complete_steps(folder)[-1]
        found = tensors(0.0)
        checkpoints.load(folder, step, found)
        values = [float(t.unique()) for t in found.values()]
        print(json.dumps({"n": n, "status": status, "step": step, "values": values}))
        if status == 0:
            return
    raise RuntimeError("the save never got through")


if __name__ == "__main__":
    main()
