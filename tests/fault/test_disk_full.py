"""A disk that takes no more, for real (RLIMIT_FSIZE): the trainer's checkpoints, on all ranks."""

import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from forge_ptq.training import checkpoints
from tests.fault.matrix import record

WORLD = 2


def tensors(value: float) -> dict[str, torch.Tensor]:
    """One tensor whole on every rank, one in shards."""
    whole = torch.full((4000,), value)
    mesh = init_device_mesh("cpu", (WORLD,))
    return {"a": whole, "b": distribute_tensor(torch.full((WORLD, 4000), value), mesh, [Shard(0)])}


def save_as(rank: int, folder: Path, full: int | None) -> None:
    """One of the trainer's ranks: exits 0 if its second save failed if and only if it should."""
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    saved = folder / "checkpoint"
    checkpoints.save(saved, 1, tensors(1.0), {}, keep=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    with pytest.raises(checkpoints.SaveError, match=rf"step-00000002: rank {full}: .* MB are free"):
        checkpoints.save(saved, 2, tensors(2.0), {}, keep=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    dist.barrier()
    assert checkpoints.complete_steps(saved) == [1]
    found = tensors(0.0)
    checkpoints.load(saved, 1, found)
    assert float(found["a"].unique()) == 1.0
    dist.barrier()
    checkpoints.save(saved, 3, tensors(3.0), {}, keep=1)
    assert checkpoints.complete_steps(saved) == [3]
    dist.barrier()


@pytest.mark.parametrize("full", [0, 1])
def test_one_ranks_disk_is_full_and_all_ranks_know(tmp_path, full):
    children = []
    for rank in range(WORLD):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                save_as(rank, tmp_path, full)
                code = 0
            except BaseException:  # noqa: BLE001  (into the captured output; the parent fails)
                import traceback

                (tmp_path / f"error-{rank}").write_text(traceback.format_exc())
            os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    errors = [path.read_text() for path in sorted(tmp_path.glob("error-*"))]
    assert codes == [0] * WORLD, "\n".join(errors)
    record("saving", "disk full", "told; the checkpoint before stays; tried again", __file__)
