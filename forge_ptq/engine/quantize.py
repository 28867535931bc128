"""Quantizing pushed weights inside the generator, for use without PTQ services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from forge_ptq.artifact import QuantizedArtifact
from forge_ptq.engine.layout import ModelLayout
from forge_ptq.numerics.plan import QuantPlan
from forge_ptq.numerics.schemes import get_scheme


def artifact_from_weights(
    layout: ModelLayout, state: Mapping[str, torch.Tensor], version: int, plan: Mapping[str, Any]
) -> QuantizedArtifact:
    """An artifact of bf16 weights under HF names by ``plan`` (default all ``int8_dynamic``).

    Raises ValueError for a plan with ``int8_static``, which needs calibration on rollouts: that is
    what the PTQ services are for.
    """
    resolved = QuantPlan.from_config(
        plan.get("default", "int8_dynamic"), plan.get("overrides")
    ).resolve(layout.hf_linears())
    static = [name for name, scheme in resolved.items() if scheme == "int8_static"]
    if static:
        raise ValueError(
            f"plan: {static[0]} is int8_static, which needs calibration; use int8_dynamic or bf16 "
            "with update_weights, or the PTQ services"
        )
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        layer = name.removesuffix(".weight")
        if name.endswith(".weight") and layer in resolved:
            parts = get_scheme(resolved[layer]).quantize(tensor.to(torch.bfloat16), name=layer)
            tensors |= {f"{layer}.{kind}": part for kind, part in parts.items()}
        elif name not in layout.tied:
            tensors[name] = tensor.to(torch.bfloat16)
    return QuantizedArtifact.build(
        policy_version=version, model="update_weights", layers=resolved, tensors=tensors
    )
