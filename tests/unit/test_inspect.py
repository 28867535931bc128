"""forge-ptq inspect: numbers, both forms, what is verified, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_ptq import cli
from forge_ptq.artifact import QuantizedArtifact
from forge_ptq.inspection import summarize
from forge_ptq.numerics.schemes import get_scheme
from tests.offline import data, model, quantize

__all__ = ["data", "model"]


@pytest.fixture
def artifact() -> QuantizedArtifact:
    layers = {"a.q_proj": "int8_static", "a.o_proj": "int8_dynamic", "b.o_proj": "bf16"}
    tensors = {"norm.weight": torch.ones(4).bfloat16()}
    for name, scheme in layers.items():
        w_NK = torch.tensor([[127.0, 0, 0, 0], [254.0, 0, 0, 0]])
        parts = get_scheme(scheme).quantize(w_NK, absmax=12.7)
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    return QuantizedArtifact.build(
        policy_version=3,
        model="Toy",
        layers=layers,
        asked={**layers, "b.o_proj": "int8_static"},
        tensors=tensors,
        notes={"b.o_proj": "was hard"},
    )


def test_summary_numbers(artifact: QuantizedArtifact) -> None:
    summary = summarize(artifact)
    assert [(r.kind, r.scheme, r.layers, r.weights, r.nbytes) for r in summary.rows] == [
        ("q_proj", "int8_static", 1, 8, 8 + 8 + 4),
        ("o_proj", "int8_dynamic", 1, 8, 8 + 8),
        ("o_proj", "bf16", 1, 8, 16),
    ]
    first = summary.rows[0]
    assert first.weight_scale is not None
    assert (first.weight_scale.low, first.weight_scale.high) == (1.0, 2.0)
    assert first.input_scale is not None
    assert first.input_scale.median == pytest.approx(0.1)
    assert all(share == pytest.approx(1 / 3) for share in summary.shares.values())
    assert summary.full_nbytes == 3 * 16 + 8


def test_inspect_prints_both_forms(
    artifact: QuantizedArtifact,
    model: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    artifact.save(tmp_path / "art")
    assert cli.main(["inspect", str(tmp_path / "art")]) == 0
    printed = capsys.readouterr().out
    assert "Toy as artifact, policy version 3" in printed
    assert "int8_static 33.3%, int8_dynamic 33.3%, bf16 33.3%" in printed
    assert "b.o_proj: was hard" in printed
    assert "no calibration" in printed
    assert quantize(model, data, tmp_path / "ct", "--default", "int8_static") == 0
    capsys.readouterr()
    assert cli.main(["inspect", str(tmp_path / "ct"), "--layers"]) == 0
    printed = capsys.readouterr().out
    assert "as compressed-tensors" in printed
    assert "calibration round 0" in printed
    assert "on held-out rollouts" in printed
    assert "model.layers.1.mlp.down_proj" in printed


def test_inspect_says_when_nothing_was_verified(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert quantize(model, data, out, "--default", "int8_static") == 0
    printed = capsys.readouterr().out
    assert "every hash verified" in printed
    assert printed.count("int8_static") > 7  # nothing is cut in a terminal of 80 columns
    (out / "manifest.json").unlink()
    assert cli.main(["inspect", str(out)]) == 1
    assert "has no manifest.json, but complete.json says" in capsys.readouterr().err
    (out / "complete.json").write_text("{")
    assert cli.main(["inspect", str(out)]) == 1
    assert "complete.json is damaged" in capsys.readouterr().err
    (out / "complete.json").unlink()
    assert cli.main(["inspect", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "no manifest: nothing was verified against hashes" in printed
    assert "verified;" not in printed
    assert "policy version" not in printed
    assert "calibration unknown" in printed
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["format"] = "pack-quantized"
    for group in config["quantization_config"]["config_groups"].values():
        group["format"] = None
    (out / "config.json").write_text(json.dumps(config))
    assert cli.main(["inspect", str(out)]) == 1
    assert "its format is 'pack-quantized', expected int-quantized" in capsys.readouterr().err
    (out / "config.json").write_text("{")
    assert cli.main(["inspect", str(out)]) == 1
    assert "config.json: not JSON" in capsys.readouterr().err


def test_inspect_refuses_what_is_damaged_or_something_else(
    artifact: QuantizedArtifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(tmp_path / "missing")]) == 1
    assert "not a directory" in capsys.readouterr().err
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert "not an artifact and not a checkpoint" in capsys.readouterr().err
    folder = artifact.save(tmp_path / "art")
    tensors = load_file(folder / "tensors.safetensors")
    tensors["a.q_proj.weight"][0, 0] -= 1
    save_file(tensors, folder / "tensors.safetensors")
    assert cli.main(["inspect", str(folder)]) == 1
    assert "a.q_proj.weight: its bytes" in capsys.readouterr().err
