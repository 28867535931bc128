"""Quantization schemes, one file each, all alike.

Every scheme module has NAME, PARTS (the tensors of a layer, in order) and two functions:
``quantize(weight_NK, *, name, absmax=None) -> {part: tensor}`` and
``dequantize({part: tensor}) -> weight_NK fp32``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

import torch

from forge_ptq.numerics.schemes import bf16, int8_dynamic, int8_static
from forge_ptq.numerics.schemes.common import INT8_MAX, INT8_MIN, SCALE_MIN, QuantizationError


class Scheme(Protocol):
    """What a scheme module offers."""

    NAME: str
    PARTS: tuple[str, ...]

    def quantize(
        self, weight_NK: torch.Tensor, *, name: str = ..., absmax: float | None = ...
    ) -> dict[str, torch.Tensor]: ...

    def dequantize(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor: ...


SCHEMES: dict[str, Scheme] = {
    module.NAME: cast(Scheme, module) for module in (int8_static, int8_dynamic, bf16)
}

PART_DTYPES: dict[str, dict[str, torch.dtype]] = {
    "int8_static": {
        "weight": torch.int8,
        "weight_scale": torch.float32,
        "input_scale": torch.float32,
    },
    "int8_dynamic": {"weight": torch.int8, "weight_scale": torch.float32},
    "bf16": {"weight": torch.bfloat16},
}
"""scheme -> part -> dtype, as stored in an artifact."""


def get_scheme(name: str) -> Scheme:
    """The scheme module called name; ValueError names the known ones."""
    if name not in SCHEMES:
        raise ValueError(f"unknown scheme {name!r}; known schemes: {', '.join(sorted(SCHEMES))}")
    return SCHEMES[name]


__all__ = [
    "INT8_MAX",
    "INT8_MIN",
    "PART_DTYPES",
    "SCALE_MIN",
    "SCHEMES",
    "QuantizationError",
    "Scheme",
    "get_scheme",
]
