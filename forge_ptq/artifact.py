"""QuantizedArtifact: everything a generator needs to serve one policy version, and its proof.

An artifact is a manifest (JSON) and tensors under HF names:

- a layer X with scheme int8_*: ``X.weight`` int8 [N, K], ``X.weight_scale`` fp32 [N, 1], and for
  int8_static ``X.input_scale`` fp32 [1];
- a layer with scheme bf16: ``X.weight`` bf16 [N, K];
- everything else that the trainer changes (embeddings, norms, untied lm_head, biases): bf16.

The manifest names the scheme of every linear layer of the plan and the shape, dtype and sha256 of
every tensor's bytes. ``verify()`` proves that tensors and manifest belong together; nothing is
served before it has passed.

On disk an artifact is a directory: ``tensors.safetensors``, then ``manifest.json``, written last
and renamed into place, so a directory with a manifest is complete.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from forge_ptq.numerics.schemes import PART_DTYPES

SCHEMA_VERSION = 1
TENSORS_FILE = "tensors.safetensors"
MANIFEST_FILE = "manifest.json"


class ArtifactError(ValueError):
    """An artifact that must not be served; the message names the tensor and what is wrong."""


@dataclass(frozen=True)
class ArtifactRef:
    """Names an artifact in the store."""

    artifact_id: str
    policy_version: int


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor must be."""

    shape: tuple[int, ...]
    dtype: str
    """As torch prints it, without "torch."."""
    sha256: str
    """Of the row-major bytes."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Manifest:
    """What an artifact holds. ``artifact_id`` is unique per publish attempt."""

    artifact_id: str
    policy_version: int
    model: str
    """Architecture name, as in the HF config."""
    layers: Mapping[str, str]
    """HF module name -> scheme, for every linear of the plan, those in bf16 included."""
    tensors: Mapping[str, TensorSpec]
    notes: Mapping[str, str] = field(default_factory=dict)
    """Layer -> why it is not what the plan asked for."""
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
        """One JSON object; ``from_json`` reads it back."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises ArtifactError for anything that is not a manifest of this schema version."""
        try:
            data: dict[str, Any] = json.loads(text)
            if data["schema_version"] != SCHEMA_VERSION:
                raise ArtifactError(
                    f"manifest has schema_version {data['schema_version']}, "
                    f"this version reads {SCHEMA_VERSION}"
                )
            tensors = {
                name: TensorSpec(tuple(spec["shape"]), str(spec["dtype"]), str(spec["sha256"]))
                for name, spec in data.pop("tensors").items()
            }
            return cls(tensors=tensors, **data)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"not an artifact manifest: {error!r}") from error


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called name ("int8"); ArtifactError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ArtifactError(f"{name!r} is not a tensor dtype")
    return dtype


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The row-major bytes of any tensor as a flat uint8 tensor (a view where possible)."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def hash_tensor(tensor: torch.Tensor) -> str:
    """sha256 hex digest of the row-major bytes, any dtype."""
    return hashlib.sha256(tensor_bytes(tensor).numpy().data).hexdigest()


def describe_tensor(tensor: torch.Tensor) -> TensorSpec:
    """Shape, dtype and hash of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(tuple(tensor.shape), dtype, hash_tensor(tensor))


@dataclass(frozen=True)
class QuantizedArtifact:
    """A manifest and its tensors {name: tensor on CPU}."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]

    @classmethod
    def build(
        cls,
        *,
        policy_version: int,
        model: str,
        layers: Mapping[str, str],
        tensors: Mapping[str, torch.Tensor],
        notes: Mapping[str, str] | None = None,
        artifact_id: str | None = None,
    ) -> QuantizedArtifact:
        """Hash the tensors and write the manifest; artifact_id defaults to a fresh unique one."""
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        manifest = Manifest(
            artifact_id=artifact_id or f"v{policy_version:010d}-{uuid.uuid4().hex[:12]}",
            policy_version=policy_version,
            model=model,
            layers=dict(layers),
            tensors={name: describe_tensor(tensor) for name, tensor in kept.items()},
            notes=dict(notes or {}),
        )
        return cls(manifest, kept)

    def verify(self, *, hashes: bool = True) -> None:
        """Raise ArtifactError, naming the tensor, unless everything is as the manifest says.

        In order: names, shapes and dtypes, the parts each layer's scheme needs, hashes, values.
        """
        verify_names(self.manifest, self.tensors)
        for name, spec in self.manifest.tensors.items():
            _verify_tensor(name, spec, self.tensors[name])
        verify_layers(self.manifest)
        for name, spec in self.manifest.tensors.items():
            if hashes and hash_tensor(self.tensors[name]) != spec.sha256:
                raise ArtifactError(
                    f"{name}: its bytes do not match the manifest's sha256; it was damaged after "
                    "it was made"
                )
            _verify_values(name, self.tensors[name])

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Write to a directory (made if missing); the manifest comes last, by rename."""
        from safetensors.torch import save_file

        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        (path / MANIFEST_FILE).unlink(missing_ok=True)
        partial = path / f"{TENSORS_FILE}.partial"
        save_file(self.tensors, str(partial), metadata={"artifact_id": self.manifest.artifact_id})
        _sync(partial)
        os.replace(partial, path / TENSORS_FILE)
        partial = path / f"{MANIFEST_FILE}.partial"
        partial.write_text(self.manifest.to_json() + "\n", encoding="utf-8")
        _sync(partial)
        os.replace(partial, path / MANIFEST_FILE)
        _sync(path)
        return path

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> QuantizedArtifact:
        """Read and verify an artifact; ArtifactError if incomplete or damaged."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = Path(directory)
        if not (path / MANIFEST_FILE).is_file():
            raise ArtifactError(f"{path} has no {MANIFEST_FILE}: not an artifact, or not complete")
        manifest = Manifest.from_json((path / MANIFEST_FILE).read_text(encoding="utf-8"))
        try:
            tensors = load_file(str(path / TENSORS_FILE))
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"{path / TENSORS_FILE} cannot be read: {error}") from error
        artifact = cls(manifest, tensors)
        artifact.verify()
        return artifact


def verify_names(manifest: Manifest, names: Mapping[str, object]) -> None:
    """Raise ArtifactError naming the first tensor that is missing or not in the manifest."""
    missing = sorted(set(manifest.tensors) - set(names))
    if missing:
        raise ArtifactError(f"{missing[0]}: missing ({len(missing)} tensors are)")
    extra = sorted(set(names) - set(manifest.tensors))
    if extra:
        raise ArtifactError(f"{extra[0]}: not in the manifest ({len(extra)} extra tensors)")


def verify_layers(manifest: Manifest) -> None:
    """Raise ArtifactError unless every layer has exactly the parts of its scheme."""
    specs = manifest.tensors
    parts_of_layers: set[str] = set()
    for layer, scheme in manifest.layers.items():
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
            parts_of_layers.add(name)
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
    for name, spec in specs.items():
        if name in parts_of_layers:
            continue
        if name.endswith("_scale"):
            raise ArtifactError(f"{name}: a scale that no layer's scheme asks for")
        if torch_dtype(spec.dtype) != torch.bfloat16:
            raise ArtifactError(
                f"{name}: outside the plan's layers tensors are bf16, got {spec.dtype}"
            )


def _verify_tensor(name: str, spec: TensorSpec, tensor: torch.Tensor) -> None:
    if tuple(tensor.shape) != spec.shape:
        raise ArtifactError(f"{name}: expected shape {list(spec.shape)}, got {list(tensor.shape)}")
    if tensor.dtype != torch_dtype(spec.dtype):
        raise ArtifactError(f"{name}: expected dtype {spec.dtype}, got {tensor.dtype}")


def _verify_values(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        return
    if not bool(torch.isfinite(tensor).all()):
        raise ArtifactError(f"{name}: holds NaN or infinite values")
    if name.endswith("_scale") and not bool((tensor > 0).all()):
        raise ArtifactError(f"{name}: scales must be positive, the smallest is {tensor.min():g}")


def _sync(path: Path) -> None:
    """Flush a file or directory to disk, so that a rename never outruns the contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
