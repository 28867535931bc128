"""forge-ptq quantize: what is asked wrongly is refused before any work."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_ptq import offline_job
from tests.offline import data, model, quantize

__all__ = ["data", "model"]


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def harm(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    return harm


def setting(**changes: Any) -> Callable[[Path], object]:
    def harm(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return harm


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-9])


def lose_a_shard(folder: Path) -> None:
    index = {"weight_map": {"x": "model.safetensors", "y": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


UP = "model.layers.1.mlp.up_proj.weight"


REFUSED: list[tuple[list[str], Callable[[Path], object] | None, str]] = [
    ([], remove("config.json"), "--model: .*config.json not found"),
    ([], remove("model.safetensors"), "--model: no \\*.safetensors"),
    (["--override", "down_proj"], None, "--override: got 'down_proj', expected PATTERN=SCHEME"),
    (["--override", "*.dwn=bf16"], None, "matches none"),
    (["--override", "*.q_proj=bf16"], None, "must share one scheme"),
    (["--override", "*.down_proj=int7"], None, "unknown scheme 'int7'"),
    (["--budget", "0"], None, "--budget: got 0.0"),
    (["--budget", "inf"], None, "--budget: got inf, expected more than 0 and finite"),
    (["--budget", "nan"], None, "--budget: got nan"),
    (["--alpha", "0.5", "--no-smoothing"], None, "--alpha: contradicts --no-smoothing"),
    ([], cut("config.json"), "--model: .*config.json: not JSON"),
    ([], cut("model.safetensors"), "--model: .*model.safetensors: cannot be read"),
    ([], lose_a_shard, "--model: .*model-00002-of-00002.safetensors is missing"),
    ([], tensors(lambda s: s.pop(UP)), f"--model: {UP} is missing"),
    ([], tensors(lambda s: s.update(odd=torch.ones(1))), "--model: odd: LlamaFor.* no such"),
    ([], tensors(lambda s: s.update({UP: s[UP][1:].clone()})), f"{UP} has shape \\[47, 32\\]"),
    ([], tensors(lambda s: s.update({UP: s[UP].char()})), f"{UP} is I8, expected full"),
    ([], setting(hidden_size=40), "--model: .* has shape"),
    ([], setting(hidden_size="wide"), "--model: .*hidden_size"),
    ([], setting(num_attention_heads=0), "--model: transformers cannot .*: ZeroDivision"),
    (
        [],
        setting(model_type="gpt2", architectures=["GPT2LMHeadModel"]),
        "--model: GPT2LMHeadModel .* is not supported, expected one of llama",
    ),
    (["--alpha", "1.5"], None, "--alpha: got 1.5"),
    (["--percentile", "101"], None, "--percentile: got 101"),
    (["--batch-tokens", "0"], None, "--batch-tokens: got 0"),
    (["--max-evaluations", "2"], None, "--max-evaluations: got 2"),
    (["--data", "/nowhere.jsonl"], None, "/nowhere.jsonl: cannot be read"),
]


@pytest.mark.parametrize(("options", "harm", "message"), REFUSED, ids=[m for *_, m in REFUSED])
def test_what_is_asked_wrongly_is_refused_at_once(
    options: list[str],
    harm: Callable[[Path], object] | None,
    message: str,
    model: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    if harm is not None:
        harm(copy)
    assert quantize(copy, data, tmp_path / "out", *options) == 2
    printed = capsys.readouterr()
    assert re.search(message, printed.err), printed.err
    assert not printed.out
    assert not (tmp_path / "out").exists()


def test_places_that_cannot_be_written(
    model: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("x")
    assert quantize(model, data, tmp_path / "file") == 2
    assert "is a file" in capsys.readouterr().err
    assert quantize(model, data, model, "--force") == 2
    assert "is or holds the model itself" in capsys.readouterr().err
    assert quantize(model, data, tmp_path / "file" / "below") == 2
    assert "file is a file" in capsys.readouterr().err
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert quantize(model, data, tmp_path / "circle") == 2
    assert "--out: " in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(offline_job.os.path, "ismount", lambda path: path == tmp_path / "mount")
        (tmp_path / "mount").mkdir()
        assert quantize(model, data, tmp_path / "mount") == 2
    assert "is a mount point" in capsys.readouterr().err
    usage: Any = type("usage", (), {"free": 1000})
    monkeypatch.setattr(offline_job.shutil, "disk_usage", lambda _: usage)
    assert quantize(model, data, tmp_path / "out") == 2
    assert "GB free" in capsys.readouterr().err
