"""bf16: the layer stays in full precision.

``quantize`` -> {"weight": bf16 [N, K]}.
Shape suffixes: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from forge_ptq.numerics.schemes.common import check_weight

NAME = "bf16"
PARTS = ("weight",)


def quantize(
    weight_NK: torch.Tensor, *, name: str = "weight", absmax: float | None = None
) -> dict[str, torch.Tensor]:
    """Round a bf16, fp16 or fp32 weight_NK to bf16; absmax is accepted and not used."""
    check_weight(weight_NK, name)
    # A copy even when it is bf16 already: the trainer's next step writes into the original.
    return {"weight": weight_NK.detach().to(torch.bfloat16, copy=True).contiguous()}


def dequantize(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """weight_NK fp32 that the parts stand for."""
    return tensors["weight"].to(torch.float32)
