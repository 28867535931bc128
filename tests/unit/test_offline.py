"""forge-ptq quantize and inspect, on a tiny model: results, records, and every early refusal."""

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

from forge_ptq import cli, offline_job
from forge_ptq.artifact import QuantizedArtifact
from forge_ptq.compressed import load_compressed
from forge_ptq.inspection import summarize
from forge_ptq.numerics.schemes import get_scheme
from tests.models import tiny_model

PROMPTS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(0)
    path = tmp_path_factory.mktemp("data") / "rollouts.jsonl"
    with path.open("w") as file:
        for index in range(PROMPTS):
            ids = torch.randint(0, 64, (5 + index % 4 + 9,), generator=generator).tolist()
            file.write(json.dumps({"prompt_ids": ids[:-9], "token_ids": ids[-9:]}) + "\n")
    return path


def quantize(model: Path, data: Path, out: Path, *options: str) -> int:
    asked = ["--model", str(model), "--data", str(data), "--out", str(out)]
    return cli.main(["quantize", *asked, *options])


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


def test_what_needs_no_calibration_gets_none(model: Path, data: Path, tmp_path: Path) -> None:
    assert quantize(model, data, tmp_path / "out", "--no-smoothing") == 0
    manifest = load_compressed(tmp_path / "out").manifest
    assert manifest.calibration is None
    assert set(manifest.layers.values()) == {"int8_dynamic"}


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


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


REFUSED: list[tuple[list[str], Callable[[Path], object] | None, str]] = [
    ([], remove("config.json"), "--model: .*config.json not found"),
    ([], remove("model.safetensors"), "--model: no \\*.safetensors"),
    (["--override", "down_proj"], None, "--override: got 'down_proj', expected PATTERN=SCHEME"),
    (["--override", "*.dwn=bf16"], None, "matches none"),
    (["--override", "*.q_proj=bf16"], None, "must share one scheme"),
    (["--override", "*.down_proj=int7"], None, "unknown scheme 'int7'"),
    (["--budget", "0"], None, "--budget: got 0.0"),
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
    usage: Any = type("usage", (), {"free": 1000})
    monkeypatch.setattr(offline_job.shutil, "disk_usage", lambda _: usage)
    assert quantize(model, data, tmp_path / "out") == 2
    assert "GB free" in capsys.readouterr().err


def test_a_plan_needs_prompts_to_measure_on(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(data.read_text().splitlines()[:3]))
    assert quantize(model, few, tmp_path / "out", "--budget", "0.03") == 2
    assert "at least 4 prompts" in capsys.readouterr().err
    assert quantize(model, few, tmp_path / "out", "--no-smoothing") == 0
    assert "held-out" not in capsys.readouterr().out.split("held out", 1)[1]


# -- inspect --


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
