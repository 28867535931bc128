"""A training checkpoint damaged after it was whole: the error says which and what to do."""

from pathlib import Path

import pytest
import torch

from forge_ptq.training import checkpoints


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("damage", ["truncated", "missing", "state"])
def test_the_error_names_the_folder_and_the_way_on(tmp_path: Path, damage: str, step: int) -> None:
    for saved in range(1, step + 1):
        checkpoints.save(tmp_path, saved, {"w": torch.ones(1000)}, {}, keep=0)
    path = checkpoints.path_of(tmp_path, step)
    (data,) = path.glob("*.distcp")
    if damage == "truncated":
        data.write_bytes(data.read_bytes()[:100])
    elif damage == "missing":
        data.unlink()
    else:
        (path / checkpoints.STATE).write_text('{"step": ')
    way_on = "resume from step 1" if step == 2 else "start anew"
    with pytest.raises(checkpoints.DamagedCheckpointError, match=rf"{path.name}.*{way_on}"):
        checkpoints.load(tmp_path, step, {"w": torch.zeros(1000)})
