"""The manifest of an artifact: what it holds, how it came about, and proof of every tensor.

JSON, schema version 2. It names the scheme that the plan asked for and the one that was used for
every linear layer, the shape, dtype and sha256 of every tensor's bytes, and the calibration behind
static scales (none for artifacts whose activations are all quantized per token). Other schema
versions, unknown fields and missing ones are refused by name: what is not understood is not served.

A manifest needs no tensors to be made: replicas that quantize a share each describe their own
tensors, and one of them joins the specs (``assemble_manifest``).

    specs = {name: describe_tensor(tensor) for name, tensor in part.items()}      each replica
    manifest = assemble_manifest(policy_version=v, model=..., layers=..., specs=all_specs)   one
"""

from __future__ import annotations

import dataclasses
import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from forge_ptq.numerics.schemes import PART_DTYPES
from forge_ptq.tensor_specs import (
    ArtifactError,
    TensorSpec,
    describe_tensor,
    hash_tensor,
    tensor_bytes,
    torch_dtype,
)

if TYPE_CHECKING:
    from forge_ptq.numerics.calibration import Calibration

__all__ = [
    "SCHEMA_VERSION",
    "ArtifactError",
    "ArtifactRef",
    "CalibrationRecord",
    "Manifest",
    "TensorSpec",
    "assemble_manifest",
    "describe_tensor",
    "hash_tensor",
    "new_artifact_id",
    "tensor_bytes",
    "torch_dtype",
    "verify_layers",
]

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class ArtifactRef:
    """Names an artifact in the store."""

    artifact_id: str
    policy_version: int


@dataclass(frozen=True)
class CalibrationRecord:
    """Where the static scales of an artifact come from."""

    round: int
    """Number of the calibration round; 0 for an offline job."""
    policy_version: int
    """Of the weights that ran in the calibration; the artifact's own may be newer."""
    tokens: int
    """Positions that were counted, over all contributors. 0: no layer needed a calibration, the
    record is there for what was measured."""
    contributors: tuple[str, ...] = ()
    """Replicas whose statistics went in."""
    dropped: tuple[str, ...] = ()
    """Replicas or shares that were left out."""
    range_method: str = "absmax"
    """How a static range was chosen: absmax, percentile, mse or kl."""
    smoothing: Mapping[str, float] = field(default_factory=dict)
    """Smoothed input (its first layer's name) -> alpha; empty where smoothing was off."""
    budget: float | None = None
    """Perplexity rise that the automatic plan had to stay within; None for a fixed plan."""
    predicted_rise: float | None = None
    """Perplexity rise that the planner measured for the chosen plan, simulated."""
    measured_rise: float | None = None
    """The same on rollouts that neither calibration nor planner saw; offline jobs measure it."""

    @classmethod
    def of(cls, calibration: Calibration, measured_rise: float | None = None) -> CalibrationRecord:
        """What a manifest keeps of a calibration."""
        return cls(
            round=calibration.round,
            policy_version=calibration.policy_version,
            tokens=calibration.tokens,
            contributors=calibration.contributors,
            dropped=calibration.dropped,
            range_method=calibration.range_method,
            smoothing=dict(calibration.alpha),
            budget=calibration.budget,
            predicted_rise=calibration.predicted_rise,
            measured_rise=measured_rise,
        )

    def __post_init__(self) -> None:
        """A rise that is not finite is unknown: JSON has no number for it."""
        for name in ("predicted_rise", "measured_rise"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                object.__setattr__(self, name, None)


@dataclass(frozen=True)
class Manifest:
    """What an artifact holds. ``artifact_id`` is unique per publish attempt."""

    artifact_id: str
    policy_version: int
    model: str
    """Architecture name, as in the HF config."""
    layers: Mapping[str, str]
    """HF module name -> scheme used, for every linear of the plan, those in bf16 included."""
    tensors: Mapping[str, TensorSpec]
    asked: Mapping[str, str] = field(default_factory=dict)
    """HF module name -> scheme the plan asked for, of the same layers."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Layer -> why it is not what the plan asked for."""
    calibration: CalibrationRecord | None = None
    """None where no layer needed one."""
    weight_error: Mapping[str, float] = field(default_factory=dict)
    """int8 layer -> |W - dequantized| / |W| when it was made, Frobenius norms; empty: not known."""
    schema_version: int = SCHEMA_VERSION

    @property
    def ref(self) -> ArtifactRef:
        """The reference under which a store keeps it."""
        return ArtifactRef(self.artifact_id, self.policy_version)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(spec.nbytes for spec in self.tensors.values())

    def to_json(self) -> str:
        """One JSON object, layers in the model's order; ``from_json`` reads it back."""
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises ArtifactError for anything that is not a manifest of this schema version."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ArtifactError(f"not an artifact manifest: {error}") from error
        if not isinstance(data, dict) or "schema_version" not in data:
            raise ArtifactError("not an artifact manifest: it has no schema_version")
        if data["schema_version"] != SCHEMA_VERSION:
            raise ArtifactError(
                f"manifest has schema_version {data['schema_version']!r}, this forge_ptq reads "
                f"{SCHEMA_VERSION}: make the artifact again, or read it with the version that "
                "made it"
            )
        _check_fields(cls, data, "manifest")
        layers = _strings(data["layers"], "layers")
        asked = _strings(data.get("asked", {}), "asked") or dict(layers)
        if set(asked) != set(layers):
            odd = sorted(set(asked) ^ set(layers))[0]
            raise ArtifactError(f"manifest: layers and asked do not name the same layers ({odd})")
        return cls(
            artifact_id=_typed(data, "artifact_id", str),
            policy_version=_typed(data, "policy_version", int),
            model=_typed(data, "model", str),
            layers=layers,
            tensors=_specs(data["tensors"]),
            asked=asked,
            notes=_strings(data.get("notes", {}), "notes"),
            calibration=_calibration(data.get("calibration")),
            weight_error=_numbers(data.get("weight_error", {}), "weight_error"),
        )


def assemble_manifest(
    *,
    policy_version: int,
    model: str,
    layers: Mapping[str, str],
    specs: Mapping[str, TensorSpec],
    asked: Mapping[str, str] | None = None,
    notes: Mapping[str, str] | None = None,
    calibration: CalibrationRecord | None = None,
    weight_error: Mapping[str, float] | None = None,
    artifact_id: str | None = None,
    check: bool = True,
) -> Manifest:
    """The manifest of tensors that may lie in several processes, from their specs alone.

    asked defaults to layers, artifact_id to a fresh unique one. ArtifactError unless every layer
    has exactly the parts of its scheme, as ``verify_layers`` says (``check=False``: later).
    """
    wanted = dict(layers if asked is None else asked)
    if set(wanted) != set(layers):
        odd = sorted(set(wanted) ^ set(layers))[0]
        raise ArtifactError(f"layers and asked do not name the same layers ({odd})")
    manifest = Manifest(
        artifact_id=artifact_id or new_artifact_id(policy_version),
        policy_version=policy_version,
        model=model,
        layers=dict(layers),
        tensors=dict(specs),
        asked=wanted,
        notes=dict(notes or {}),
        calibration=calibration,
        weight_error=dict(weight_error or {}),
    )
    if check:
        verify_layers(manifest)
    return manifest


def new_artifact_id(policy_version: int) -> str:
    """A fresh id that begins with the policy version."""
    return f"v{policy_version:010d}-{uuid.uuid4().hex[:12]}"


def verify_layers(manifest: Manifest) -> None:
    """Raise ArtifactError unless every layer has exactly the parts of its scheme."""
    specs = manifest.tensors
    parts_of_layers: set[str] = set()
    for layer, scheme in manifest.layers.items():
        parts_of_layers |= _verify_layer(layer, scheme, specs)
    for name, spec in specs.items():
        if name in parts_of_layers:
            continue
        if name.endswith("_scale"):
            raise ArtifactError(f"{name}: a scale that no layer's scheme asks for")
        if torch_dtype(spec.dtype) != torch.bfloat16:
            raise ArtifactError(
                f"{name}: outside the plan's layers tensors are bf16, got {spec.dtype}"
            )


def _verify_layer(layer: str, scheme: str, specs: Mapping[str, TensorSpec]) -> set[str]:
    """The names of a layer's parts, each checked for presence, dtype and shape."""
    if scheme not in PART_DTYPES:
        raise ArtifactError(f"{layer}: unknown scheme {scheme!r}")
    parts = PART_DTYPES[scheme]
    for part, dtype in parts.items():
        name = f"{layer}.{part}"
        if name not in specs:
            raise ArtifactError(f"{name}: missing, a layer with scheme {scheme} needs it")
        if torch_dtype(specs[name].dtype) != dtype:
            raise ArtifactError(
                f"{name}: scheme {scheme} needs dtype {dtype}, got {specs[name].dtype}"
            )
    weight = specs[f"{layer}.weight"].shape
    if len(weight) != 2:
        raise ArtifactError(f"{layer}.weight: expected shape [N, K], got {list(weight)}")
    shapes = {"weight": weight, "weight_scale": (weight[0], 1), "input_scale": (1,)}
    for part in parts:
        got = specs[f"{layer}.{part}"].shape
        if got != shapes[part]:
            raise ArtifactError(
                f"{layer}.{part}: expected shape {list(shapes[part])}, got {list(got)}"
            )
    return {f"{layer}.{part}" for part in parts}


def _check_fields(cls: Any, data: Mapping[str, Any], where: str) -> None:
    """Raise ArtifactError naming every field of a JSON object that is missing or unknown."""
    if not isinstance(data, dict):
        raise ArtifactError(f"{where}: expected an object, got {type(data).__name__}")
    known = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(data) - set(known))
    missing = [
        name
        for name, f in known.items()
        if name not in data
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if unknown or missing:
        wrong = [f"unknown fields {', '.join(unknown)}"] if unknown else []
        wrong += [f"missing fields {', '.join(missing)}"] if missing else []
        raise ArtifactError(f"{where}: {' and '.join(wrong)}")


def _typed(data: Mapping[str, Any], name: str, *kinds: type) -> Any:
    value = data[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ArtifactError(f"manifest: {name} is {value!r}, expected {expected}")
    return value


def _strings(value: Any, name: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ArtifactError(f"manifest: {name} must map names to strings")
    return value


def _numbers(value: Any, name: str) -> dict[str, float]:
    if not isinstance(value, dict):
        raise ArtifactError(f"manifest: {name} must map names to numbers")
    return {key: float(_typed(value, key, int, float)) for key in value}


def _specs(value: Any) -> dict[str, TensorSpec]:
    if not isinstance(value, dict):
        raise ArtifactError("manifest: tensors must map names to shape, dtype and sha256")
    specs = {}
    for name, spec in value.items():
        _check_fields(TensorSpec, spec, f"manifest: tensors[{name!r}]")
        shape = spec["shape"]
        if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ArtifactError(f"manifest: tensors[{name!r}] has shape {shape!r}")
        dtype, sha256 = _typed(spec, "dtype", str), _typed(spec, "sha256", str)
        torch_dtype(dtype)
        specs[name] = TensorSpec(tuple(shape), dtype, sha256)
    return specs


def _calibration(value: Any) -> CalibrationRecord | None:
    if value is None:
        return None
    _check_fields(CalibrationRecord, value, "manifest: calibration")
    for name in ("round", "policy_version", "tokens"):
        _typed(value, name, int)
    for name in ("contributors", "dropped"):
        value[name] = tuple(_typed(value, name, list)) if name in value else ()
    for name in ("budget", "predicted_rise", "measured_rise"):
        if value.get(name) is not None:
            _typed(value, name, int, float)
    return CalibrationRecord(**value)
