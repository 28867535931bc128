"""What an artifact holds, summed up: schemes and scales per class of layers, sizes, shares."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from forge_ptq.artifact import MANIFEST_FILE, TENSORS_FILE, ArtifactError, QuantizedArtifact
from forge_ptq.compressed import load_compressed
from forge_ptq.numerics.plan import SCHEME_NAMES


@dataclass(frozen=True)
class Spread:
    """Smallest, median and largest of some scales."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> Spread | None:
        """Over all elements; None if there are none."""
        values = [tensor.reshape(-1) for tensor in tensors]
        if not values:
            return None
        whole = torch.cat(values)
        return cls(float(whole.min()), float(whole.median()), float(whole.max()))


@dataclass(frozen=True)
class Row:
    """Layers of one class (leaf name) that have the same scheme."""

    kind: str
    scheme: str
    layers: int
    weights: int
    """Elements of their matrices, so multiplications per token."""
    nbytes: int
    """Scales included."""
    weight_scale: Spread | None
    input_scale: Spread | None


@dataclass(frozen=True)
class Summary:
    """An artifact in numbers."""

    artifact: QuantizedArtifact
    form: str
    """artifact or compressed-tensors."""
    rows: tuple[Row, ...]
    verified: bool = True
    """False where it came without a manifest, so that there were no hashes to compare with."""

    @property
    def shares(self) -> dict[str, float]:
        """Scheme -> share of the linear layers' FLOPs (lm_head, never quantized, not counted)."""
        total = sum(row.weights for row in self.rows) or 1
        return {
            scheme: sum(row.weights for row in self.rows if row.scheme == scheme) / total
            for scheme in SCHEME_NAMES
        }

    @property
    def full_nbytes(self) -> int:
        """Bytes of the same policy in bf16."""
        specs = self.artifact.manifest.tensors
        return sum(
            2 * math.prod(spec.shape) for name, spec in specs.items() if not name.endswith("_scale")
        )


def load(directory: Path) -> Summary:
    """The contents of either kind of directory; ArtifactError or OSError."""
    if not directory.is_dir():
        raise ArtifactError(f"{directory} is not a directory")
    if (directory / TENSORS_FILE).is_file():
        return summarize(QuantizedArtifact.load(directory))
    if (directory / "config.json").is_file():
        verified = (directory / MANIFEST_FILE).is_file()
        return summarize(load_compressed(directory), "compressed-tensors", verified=verified)
    raise ArtifactError(
        f"{directory} has neither {MANIFEST_FILE} and {TENSORS_FILE} nor config.json: not an "
        "artifact and not a checkpoint"
    )


def summarize(
    artifact: QuantizedArtifact, form: str = "artifact", *, verified: bool = True
) -> Summary:
    """Rows in the order in which classes and schemes first occur in the model."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, scheme in artifact.manifest.layers.items():
        groups.setdefault((name.rpartition(".")[2], scheme), []).append(name)
    rows = tuple(_row(artifact, *key, names) for key, names in groups.items())
    return Summary(artifact, form, rows, verified)


def _row(artifact: QuantizedArtifact, kind: str, scheme: str, names: list[str]) -> Row:
    def parts(part: str) -> list[torch.Tensor]:
        found = (artifact.tensors.get(f"{name}.{part}") for name in names)
        return [tensor for tensor in found if tensor is not None]

    weights, scales, inputs = parts("weight"), parts("weight_scale"), parts("input_scale")
    return Row(
        kind=kind,
        scheme=scheme,
        layers=len(names),
        weights=sum(tensor.numel() for tensor in weights),
        nbytes=sum(t.numel() * t.element_size() for t in [*weights, *scales, *inputs]),
        weight_scale=Spread.of(scales),
        input_scale=Spread.of(inputs),
    )
