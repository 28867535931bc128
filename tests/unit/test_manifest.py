"""Manifests: round trip, what is refused and by which name, assembly from parts."""

import json
from typing import Any

import pytest
import torch

from forge_ptq.artifact import (
    ArtifactError,
    CalibrationRecord,
    Manifest,
    QuantizedArtifact,
    TensorSpec,
    assemble_manifest,
    describe_tensor,
)
from forge_ptq.numerics.schemes import get_scheme

LAYERS = {"a.o_proj": "int8_static", "a.down_proj": "int8_dynamic", "b.down_proj": "bf16"}
RECORD = CalibrationRecord(
    round=3,
    policy_version=7,
    tokens=12345,
    contributors=("h:1", "h:2"),
    dropped=("h:3",),
    range_method="mse",
    smoothing={"a.o_proj": 0.5},
    budget=0.03,
    predicted_rise=0.021,
)


def parts() -> dict[str, dict[str, torch.Tensor]]:
    """Each layer's tensors, as a replica of its own would make them."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for layer, scheme in LAYERS.items():
        w_NK = torch.randn(5, 7, generator=generator)
        quantized = get_scheme(scheme).quantize(w_NK, absmax=2.0)
        made[layer] = {f"{layer}.{part}": tensor for part, tensor in quantized.items()}
    made["rest"] = {"norm.weight": torch.ones(7).bfloat16()}
    return made


def specs() -> dict[str, TensorSpec]:
    return {n: describe_tensor(t) for part in parts().values() for n, t in part.items()}


def manifest(**changes: Any) -> Manifest:
    given: dict[str, Any] = {
        "policy_version": 8,
        "model": "Toy",
        "layers": LAYERS,
        "asked": {**LAYERS, "b.down_proj": "int8_static"},
        "specs": specs(),
        "notes": {"b.down_proj": "it is hard"},
        "calibration": RECORD,
        "weight_error": {"a.o_proj": 0.004, "a.down_proj": 0.0},
    }
    return assemble_manifest(**{**given, **changes})


@pytest.mark.parametrize("calibration", [RECORD, None, CalibrationRecord(0, 1, 0)])
def test_round_trip_is_exact(calibration: CalibrationRecord | None) -> None:
    made = manifest(calibration=calibration)
    assert Manifest.from_json(made.to_json()) == made


def test_without_weight_errors_it_is_read_all_the_same() -> None:
    data = json.loads(manifest().to_json())
    del data["weight_error"]
    assert Manifest.from_json(json.dumps(data)).weight_error == {}


def test_a_rise_that_is_not_finite_is_unknown() -> None:
    record = CalibrationRecord(0, 1, 0, predicted_rise=float("inf"), measured_rise=float("nan"))
    assert (record.predicted_rise, record.measured_rise) == (None, None)
    made = manifest(calibration=record)
    assert Manifest.from_json(made.to_json()) == made


def test_parts_described_apart_give_the_manifest_of_the_whole() -> None:
    tensors = {n: t for part in parts().values() for n, t in part.items()}
    whole = QuantizedArtifact.build(
        policy_version=8,
        model="Toy",
        layers=LAYERS,
        tensors=tensors,
        artifact_id="x",
        calibration=RECORD,
    )
    whole.verify()
    assert manifest(artifact_id="x", asked=None, notes=None, weight_error=None) == whole.manifest
    assert manifest().artifact_id != manifest().artifact_id


def test_a_part_that_never_came_is_named() -> None:
    incomplete = {name: spec for name, spec in specs().items() if not name.startswith("a.down")}
    with pytest.raises(ArtifactError, match=r"a\.down_proj\.weight: missing"):
        manifest(specs=incomplete)


def test_plan_asked_and_used_name_the_same_layers() -> None:
    with pytest.raises(ArtifactError, match=r"same layers \(c\)"):
        manifest(asked={**LAYERS, "c": "bf16"})


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"schema_version": 1}, "schema_version 1.*reads 2.*make the artifact again"),
    ({"schema_version": "2"}, "schema_version '2'"),
    ({"colour": 1, "size": 2}, "manifest: unknown fields colour, size"),
    ({"layers": ..., "model": ...}, "manifest: missing fields model, layers"),
    ({"policy_version": "8"}, "policy_version is '8', expected int"),
    ({"policy_version": True}, "policy_version is True"),
    ({"layers": []}, "layers must map"),
    ({"asked": {"other": "bf16"}}, "same layers"),
    ({"tensors": [1]}, "tensors must map"),
    ({"tensors": {"a": {"shape": [1], "dtype": "int8"}}}, r"tensors\['a'\]: missing fields sha256"),
    ({"tensors": {"a": {"shape": [1.5], "dtype": "int8", "sha256": ""}}}, r"shape \[1\.5\]"),
    ({"tensors": {"a": {"shape": [1], "dtype": "evil", "sha256": ""}}}, "'evil' is not a tensor"),
    ({"calibration": {"round": 1, "tokens": 5}}, "calibration: missing fields policy_version"),
    ({"calibration": 5}, "calibration: expected an object"),
    ({"weight_error": [1]}, "weight_error must map names to numbers"),
    ({"weight_error": {"a": "0.1"}}, "manifest: a is '0.1', expected int or float"),
    (
        {"calibration": {"round": 1, "policy_version": 1, "tokens": 5, "mood": 1}},
        "calibration: unknown fields mood",
    ),
    (
        {"calibration": {"round": 1, "policy_version": 1, "tokens": 5, "budget": "x"}},
        "budget is 'x'",
    ),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[m for _, m in CHANGES])
def test_what_is_not_understood_is_named(change: dict[str, Any], message: str) -> None:
    data = json.loads(manifest().to_json())
    for key, value in change.items():
        if value is ...:
            del data[key]
        else:
            data[key] = value
    with pytest.raises(ArtifactError, match=message):
        Manifest.from_json(json.dumps(data))
