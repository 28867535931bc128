"""What the int8 schemes share: symmetric per-channel weight codes, made by torchao's primitives.

A weight_NK [N, K] becomes codes_NK int8 in [-127, 127] and scale_N1 fp32 [N, 1] with
``weight_NK ~ codes_NK * scale_N1`` and ``scale = absmax / 127``.

torchao's int8 modules ask ``choose_qparams_affine`` for the range [-128, 127], which makes their
own scale absmax / 127.5 and lets the largest positive weight clip by half a step. We ask the same
primitive for [-127, 127]: the scale is absmax / 127, nothing clips, and the codes are the ones
that torchao's ``Int8Tensor`` computes when it is given that scale. Scales are computed in fp32
whatever the input dtype: absmax / 127 rounded to bf16 is off by up to 0.4 %.

A row of zeros has no range; its scale is SCALE_MIN (fp32 epsilon, as in torchao), so that every
scale is positive and finite and its codes are zero.

Shape suffixes: N output features, K input features.
"""

from __future__ import annotations

import torch

INT8_MAX = 127
"""Largest code, and with a minus the smallest of a weight."""

INT8_MIN = -128
"""Smallest code of an activation: static scales clip there."""

SCALE_MIN = torch.finfo(torch.float32).eps
"""Smallest scale handed out, for weights and activations alike."""


class QuantizationError(ValueError):
    """A tensor that cannot be quantized; the message names it and says what is wrong with it."""


def check_weight(weight_NK: torch.Tensor, name: str) -> None:
    """Raise QuantizationError unless weight_NK is a non-empty, finite, floating matrix."""
    if weight_NK.dim() != 2:
        raise QuantizationError(
            f"{name}: expected a weight of shape [N, K], got {list(weight_NK.shape)}"
        )
    if weight_NK.numel() == 0:
        raise QuantizationError(f"{name}: the weight is empty, shape {list(weight_NK.shape)}")
    if not weight_NK.is_floating_point():
        raise QuantizationError(f"{name}: expected a floating-point weight, got {weight_NK.dtype}")
    bad = int((~torch.isfinite(weight_NK)).sum())
    if bad:
        raise QuantizationError(
            f"{name}: {bad} of {weight_NK.numel()} weights are NaN or infinite; "
            "the policy that was pushed has diverged"
        )


@torch.no_grad()
def quantize_weight(weight_NK: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes_NK int8, scale_N1 fp32) of a bf16, fp16 or fp32 weight."""
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        quantize_affine,
    )

    check_weight(weight_NK, name)
    w_NK = weight_NK.detach().to(torch.float32).contiguous()
    features = w_NK.shape[1]
    if features == 1:
        # torchao reads a block of (1, 1) as one per-tensor block; a zero column changes no absmax.
        w_NK = torch.nn.functional.pad(w_NK, (0, 1))
    block = (1, w_NK.shape[1])
    scale_N1, zero_N1 = choose_qparams_affine(
        w_NK,
        MappingType.SYMMETRIC,
        block,
        torch.int8,
        quant_min=-INT8_MAX,
        quant_max=INT8_MAX,
        eps=SCALE_MIN,
        scale_dtype=torch.float32,
        zero_point_dtype=torch.int8,
        keepdim=True,
    )
    codes_NK = quantize_affine(w_NK, block, scale_N1, zero_N1, torch.int8, -INT8_MAX, INT8_MAX)
    return codes_NK[:, :features].contiguous(), scale_N1


@torch.no_grad()
def dequantize_weight(codes_NK: torch.Tensor, scale_N1: torch.Tensor) -> torch.Tensor:
    """codes_NK int8 times scale_N1 fp32 -> weight_NK fp32."""
    from torchao.quantization.quant_primitives import dequantize_affine

    if codes_NK.shape[1] == 1:
        return codes_NK.to(torch.float32) * scale_N1
    return dequantize_affine(
        codes_NK, (1, codes_NK.shape[1]), scale_N1, None, torch.int8, -INT8_MAX, INT8_MAX
    )


def activation_scale(absmax: float, name: str) -> torch.Tensor:
    """Static input scale [1] fp32 = absmax / 127 of a layer's calibrated input range."""
    value = torch.tensor([absmax], dtype=torch.float32)
    if not bool(torch.isfinite(value).all()) or absmax <= 0:
        raise QuantizationError(
            f"{name}: static activations need a positive, finite absmax, got {absmax}; "
            "calibrate the layer or plan it as int8_dynamic"
        )
    return (value / INT8_MAX).clamp(min=SCALE_MIN)
