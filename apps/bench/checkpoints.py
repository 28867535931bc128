"""Artifacts of a checkpoint without calibration, for benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from forge_ptq.artifact import QuantizedArtifact
from forge_ptq.models.checkpoint import iter_tensors, read_config
from forge_ptq.numerics.plan import QuantPlan
from forge_ptq.numerics.schemes import get_scheme


def quantize_checkpoint(
    model: Path, default: str, overrides: Mapping[str, str], *, absmax: float, version: int = 1
) -> QuantizedArtifact:
    """Artifact of a bf16 HF checkpoint. ``absmax`` stands in for calibration of static layers."""
    state = dict(iter_tensors(model))
    linears = [n.removesuffix(".weight") for n in state if n.endswith("_proj.weight")]
    layers = QuantPlan.from_config(default, overrides).resolve(linears)
    tensors = {n: t for n, t in state.items() if n.removesuffix(".weight") not in layers}
    for name, scheme in layers.items():
        parts = get_scheme(scheme).quantize(state[f"{name}.weight"], name=name, absmax=absmax)
        tensors |= {f"{name}.{kind}": tensor for kind, tensor in parts.items()}
    if read_config(model).get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    return QuantizedArtifact.build(
        policy_version=version, model=model.name, layers=layers, tensors=tensors
    )
