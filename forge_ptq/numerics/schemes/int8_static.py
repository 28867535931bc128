"""int8_static: per-channel int8 weights; activations share one scale fixed by calibration.

``quantize`` -> {"weight": int8 [N, K], "weight_scale": fp32 [N, 1], "input_scale": fp32 [1]}.
Shape suffixes: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from forge_ptq.numerics.schemes.common import (
    QuantizationError,
    activation_scale,
    dequantize_weight,
    quantize_weight,
)

NAME = "int8_static"
PARTS = ("weight", "weight_scale", "input_scale")


def quantize(
    weight_NK: torch.Tensor, *, name: str = "weight", absmax: float | None = None
) -> dict[str, torch.Tensor]:
    """Quantize a bf16, fp16 or fp32 weight_NK; absmax is max|x| of the layer's input."""
    if absmax is None:
        raise QuantizationError(f"{name}: int8_static needs the calibrated absmax of its input")
    codes_NK, scale_N1 = quantize_weight(weight_NK, name)
    input_scale_1 = activation_scale(absmax, name)
    return {"weight": codes_NK, "weight_scale": scale_N1, "input_scale": input_scale_1}


def dequantize(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """weight_NK fp32 that the parts stand for."""
    return dequantize_weight(tensors["weight"], tensors["weight_scale"])
