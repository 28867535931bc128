"""forge-ptq quantize on a tiny model: results, records, and what is left when it is stopped."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from forge_ptq import compressed
from forge_ptq.compressed import load_compressed
from forge_ptq.numerics.schemes import get_scheme
from tests.offline import data, model, quantize

__all__ = ["data", "model"]


def test_static_with_smoothing(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--default", "int8_static", "--override", "*.down_proj=bf16"]
    options += ["--range", "mse", "--policy-version", "7"]
    assert quantize(model, data, tmp_path / "out", *options) == 0
    printed = capsys.readouterr().out
    assert "9 calibrate, 0 decide the plan, 3 held out" in printed
    stages = [line.removesuffix(" ...") for line in printed.splitlines() if line.endswith(" ...")]
    assert stages == ["load", "observe", "observe smoothed", "quantize", "measure", "write"]
    assert "held-out response tokens: perplexity" in printed
    artifact = load_compressed(tmp_path / "out")
    manifest = artifact.manifest
    schemes = {name.rpartition(".")[2]: scheme for name, scheme in manifest.layers.items()}
    assert schemes.pop("down_proj") == "bf16"
    assert set(schemes.values()) == {"int8_static"}
    record = manifest.calibration
    assert record is not None
    assert (manifest.policy_version, record.policy_version, record.round) == (7, 7, 0)
    assert record.range_method == "mse"
    assert record.smoothing
    assert record.tokens > 0
    assert record.measured_rise is not None
    assert abs(record.measured_rise) < 0.5
    # Smoothing by powers of two: W f / f is W, up to the rounding of the codes.
    source = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    parts = {part: artifact.tensors[f"{name}.{part}"] for part in ("weight", "weight_scale")}
    w_NK = get_scheme("int8_dynamic").dequantize(parts)
    norm = "model.layers.0.input_layernorm.weight"
    factor_K = source[norm].float() / artifact.tensors[norm].float()
    assert torch.equal(factor_K.log2(), factor_K.log2().round())
    bound_N1 = parts["weight_scale"] * 0.5001
    error_NK = (w_NK - source[f"{name}.weight"].float() * factor_K).abs()
    assert bool((error_NK <= bound_N1).all())


def test_automatic_plan(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--budget", "5.0", "--override", "*.o_proj=bf16", "--max-evaluations", "4"]
    assert quantize(model, data, tmp_path / "out", *options) == 0
    assert "6 calibrate, 3 decide the plan, 3 held out" in capsys.readouterr().out
    manifest = load_compressed(tmp_path / "out").manifest
    assert {s for n, s in manifest.layers.items() if n.endswith("o_proj")} == {"bf16"}
    assert {s for n, s in manifest.layers.items() if not n.endswith("o_proj")} == {"int8_static"}
    assert manifest.calibration is not None
    assert manifest.calibration.budget == 5.0
    assert manifest.calibration.predicted_rise is not None


def test_what_needs_no_calibration_gets_none(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(model, data, tmp_path / "out", "--no-smoothing") == 0
    manifest = load_compressed(tmp_path / "out").manifest
    assert set(manifest.layers.values()) == {"int8_dynamic"}
    record = manifest.calibration
    assert record is not None  # for the sake of what was measured
    assert (record.tokens, record.contributors, dict(record.smoothing)) == (0, (), {})
    assert record.measured_rise is not None
    printed = capsys.readouterr().out
    assert "no calibration: nothing in here depends" in printed
    assert "perplexity rise: on held-out rollouts" in printed


def test_force_replaces_only_what_was_made_here(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert quantize(model, data, out, "--no-smoothing") == 0
    first = load_compressed(out).manifest.artifact_id
    assert quantize(model, data, out, "--no-smoothing") == 2
    assert "--force replaces it" in capsys.readouterr().err
    assert quantize(model, data, out, "--no-smoothing", "--force") == 0
    assert load_compressed(out).manifest.artifact_id != first
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    assert quantize(model, data, tmp_path / "mine", "--force") == 2
    assert "no checkpoint made here" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_crash_leaves_nothing(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "nan"
    shutil.copytree(model, bad)
    state = load_file(bad / "model.safetensors")
    state["model.layers.0.mlp.up_proj.weight"][1, 2] = float("nan")
    save_file(state, bad / "model.safetensors", metadata={"format": "pt"})
    assert quantize(bad, data, tmp_path / "out") == 1
    assert "NaN or infinite" in capsys.readouterr().err
    assert quantize(bad, data, tmp_path / "out", "--no-smoothing") == 1
    assert "up_proj: 1 of" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nan"]


def test_a_symbolic_link_is_written_through(model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "disk" / "real").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    assert quantize(model, data, tmp_path / "link", "--no-smoothing") == 0
    assert (tmp_path / "link").is_symlink()
    assert load_compressed(tmp_path / "disk" / "real").manifest.layers
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["real"]


@pytest.mark.parametrize("error", [SafetensorError("No space left"), OSError("No space left")])
def test_a_disk_that_fills_up(
    error: Exception,
    model: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fill(_: Any, __: Any, folder: Path) -> None:
        (folder / "half").write_text("x")
        raise error

    monkeypatch.setattr(compressed, "save_compressed", fill)
    assert quantize(model, data, tmp_path / "new" / "out", "--no-smoothing") == 1
    assert "out could not be written: No space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("swallow", [False, True])
def test_a_signal_while_writing(
    number: signal.Signals,
    code: int,
    swallow: bool,
    model: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(_: Any, __: Any, folder: Path) -> None:
        (folder / "half").write_text("x")
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except BaseException as error:  # as libraries do that make an error of their own of it
            if swallow:
                raise SafetensorError("callback failed") from error
            raise

    monkeypatch.setattr(compressed, "save_compressed", interrupted)
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    assert quantize(model, data, tmp_path / "out", "--no-smoothing") == code
    assert f"interrupted by {number.name}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_plan_needs_prompts_to_measure_on(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(data.read_text().splitlines()[:3]))
    assert quantize(model, few, tmp_path / "out", "--budget", "0.03") == 2
    assert "at least 4 prompts" in capsys.readouterr().err
    assert quantize(model, few, tmp_path / "out", "--no-smoothing") == 0
    printed = capsys.readouterr().out
    assert "warning: fewer than four prompts" in printed
    assert "held-out" not in printed
    assert load_compressed(tmp_path / "out").manifest.calibration is None
