"""A resolved plan as a torchao ``FqnToConfig``, to run the same quantization on torchao's modules.

    layers = plan.resolve(linear_names)
    torchao.quantize_(model, plan.to_fqn_config(layers, absmax), filter_fn=None)

The model's planned linears then hold torchao ``Int8Tensor`` weights. What agrees with our schemes:

- codes and scales of the weights, bit for bit;
- static activations: the same scale, so the same codes, and in fp32 the same outputs bit for bit
  (torchao rounds bf16 outputs once more, between the two scales);
- dynamic activations do not: torchao lets codes run over [-128, 127], so it divides a token's
  absmax by 127.5 where we, vLLM and compressed-tensors divide by 127.

torchao's own configs divide the absmax of weight rows by 127.5 too and take no weight scale from
outside. So the default is two subclasses of them, which hand ``Int8Tensor`` our scale and change
nothing else. ``stock=True`` gives torchao's plain configs instead: weight scales then are 127/127.5
of ours, and codes of large weights differ by one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torchao.core.config import AOBaseConfig
from torchao.quantization import (
    FqnToConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    PerRow,
    PerTensor,
)
from torchao.quantization.quantize_.workflows.int8.int8_tensor import (
    Int8Tensor,
    QuantizeTensorToInt8Kwargs,
)
from torchao.quantization.transform_module import register_quantize_module_handler

from forge_ptq.numerics.schemes.common import QuantizationError, activation_scale, quantize_weight


@dataclass
class SymmetricStaticConfig(Int8StaticActivationInt8WeightConfig):
    """torchao's static int8 with weight scales of absmax / 127."""


@dataclass
class SymmetricDynamicConfig(Int8DynamicActivationInt8WeightConfig):
    """torchao's dynamic int8 with weight scales of absmax / 127."""


@register_quantize_module_handler(SymmetricStaticConfig)
def _static(module: torch.nn.Module, config: SymmetricStaticConfig) -> torch.nn.Module:
    return _quantize(module, PerTensor(), config.act_quant_scale)


@register_quantize_module_handler(SymmetricDynamicConfig)
def _dynamic(module: torch.nn.Module, config: SymmetricDynamicConfig) -> torch.nn.Module:
    return _quantize(module, PerRow(), None)


def _quantize(
    module: torch.nn.Module, inputs: PerRow | PerTensor, input_scale: torch.Tensor | None
) -> torch.nn.Module:
    weight_NK: torch.Tensor = module.weight.detach()  # type: ignore[operator]
    _, scale_N1 = quantize_weight(weight_NK, type(module).__name__)
    tensor = Int8Tensor.from_hp(
        weight_NK,
        PerRow(),
        scale=scale_N1,
        act_quant_kwargs=QuantizeTensorToInt8Kwargs(granularity=inputs),
        act_quant_scale=input_scale,
    )
    module.weight = torch.nn.Parameter(tensor, requires_grad=False)
    return module


def fqn_config(
    layers: Mapping[str, str],
    absmax: Mapping[str, float] | None = None,
    *,
    stock: bool = False,
    input_dims: int = 3,
) -> FqnToConfig:
    """Config for ``torchao.quantize_`` of {layer: scheme}; bf16 layers map to None.

    absmax: calibrated max|x| per static layer; QuantizationError names one that is missing.
    input_dims: dimensions of the layers' inputs, [B, T, K] by default: torchao wants a static scale
    with as many. stock: torchao's own weight range, see above.
    """
    configs: OrderedDict[str, AOBaseConfig | None] = OrderedDict()
    static = Int8StaticActivationInt8WeightConfig if stock else SymmetricStaticConfig
    dynamic = Int8DynamicActivationInt8WeightConfig if stock else SymmetricDynamicConfig
    for name, scheme in layers.items():
        if scheme == "int8_static":
            if absmax is None or name not in absmax:
                raise QuantizationError(
                    f"{name}: int8_static needs the calibrated absmax of its input"
                )
            configs[name] = static(
                act_quant_scale=activation_scale(absmax[name], name).reshape((1,) * input_dims),
                granularity=[PerTensor(), PerRow()],
                set_inductor_config=False,
            )
        elif scheme == "int8_dynamic":
            configs[name] = dynamic(granularity=PerRow(), set_inductor_config=False)
        elif scheme == "bf16":
            configs[name] = None
        else:
            raise QuantizationError(f"{name}: torchao has no config for scheme {scheme!r}")
    return FqnToConfig(fqn_to_config=configs)
