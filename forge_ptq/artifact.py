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

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from forge_ptq.manifest import (
    SCHEMA_VERSION,
    ArtifactError,
    ArtifactRef,
    CalibrationRecord,
    Manifest,
    TensorSpec,
    assemble_manifest,
    describe_tensor,
    hash_tensor,
    new_artifact_id,
    tensor_bytes,
    torch_dtype,
    verify_layers,
)

TENSORS_FILE = "tensors.safetensors"
MANIFEST_FILE = "manifest.json"

__all__ = [
    "MANIFEST_FILE",
    "SCHEMA_VERSION",
    "TENSORS_FILE",
    "ArtifactError",
    "ArtifactRef",
    "CalibrationRecord",
    "Manifest",
    "QuantizedArtifact",
    "TensorSpec",
    "assemble_manifest",
    "describe_tensor",
    "hash_tensor",
    "new_artifact_id",
    "tensor_bytes",
    "torch_dtype",
    "verify_layers",
    "verify_names",
]


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
        asked: Mapping[str, str] | None = None,
        notes: Mapping[str, str] | None = None,
        calibration: CalibrationRecord | None = None,
        artifact_id: str | None = None,
    ) -> QuantizedArtifact:
        """Hash the tensors and write the manifest; ``verify`` says whether they fit together."""
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        manifest = assemble_manifest(
            policy_version=policy_version,
            model=model,
            layers=layers,
            specs={name: describe_tensor(tensor) for name, tensor in kept.items()},
            asked=asked,
            notes=notes,
            calibration=calibration,
            artifact_id=artifact_id,
            check=False,
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
