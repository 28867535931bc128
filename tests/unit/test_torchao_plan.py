"""Plans run by torchao.quantize_ against our schemes and kernels, bit for bit where they agree."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torchao import quantize_
from torchao.quantization import Int8DynamicActivationInt8WeightConfig

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from forge_ptq.engine.kernels import Fp32Kernels
from forge_ptq.numerics.plan import QuantPlan
from forge_ptq.numerics.schemes import QuantizationError, get_scheme

ABSMAX = {"a.q_proj": 2.5, "a.o_proj": 0.7}


class Block(nn.Module):
    """Linears of odd sizes, with and without bias."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.ModuleDict(
            {
                "q_proj": nn.Linear(33, 17, bias=True),
                "o_proj": nn.Linear(48, 5, bias=False),
                "up_proj": nn.Linear(33, 20, bias=False),
                "down_proj": nn.Linear(20, 33, bias=False),
            }
        )
        self.lm_head = nn.Linear(33, 50, bias=False)
        self.to(dtype)
        with torch.no_grad():
            linear_of(self, "a.q_proj").weight[3] = 0


def linear_of(block: nn.Module, name: str) -> Any:
    """A linear of the block; its weight may be torchao's."""
    return block.get_submodule(name)


PLAN = QuantPlan.from_config("int8_static", {"*.up_proj": "int8_dynamic", "*.down_proj": "bf16"})


def quantized(
    dtype: torch.dtype, *, stock: bool = False, input_dims: int = 3
) -> tuple[Block, Block, dict[str, str]]:
    """(the model, the same quantized by torchao, the plan)."""
    plain, block = Block(dtype), Block(dtype)
    layers = PLAN.resolve(n for n, m in plain.named_modules() if isinstance(m, nn.Linear))
    assert "lm_head" not in layers
    config = PLAN.to_fqn_config(layers, ABSMAX, stock=stock, input_dims=input_dims)
    quantize_(block, config, filter_fn=None)
    return plain, block, layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_our_schemes(dtype: torch.dtype) -> None:
    plain, block, layers = quantized(dtype)
    assert set(layers.values()) == {"int8_static", "int8_dynamic", "bf16"}
    for name, scheme in layers.items():
        parts = get_scheme(scheme).quantize(linear_of(plain, name).weight, absmax=ABSMAX.get(name))
        weight = linear_of(block, name).weight
        if scheme == "bf16":
            assert torch.equal(weight, linear_of(plain, name).weight)
            continue
        assert torch.equal(weight.qdata, parts["weight"])
        assert torch.equal(weight.scale, parts["weight_scale"])
        if scheme == "int8_static":
            assert torch.equal(weight.act_quant_scale.reshape(1), parts["input_scale"])
    assert type(block.lm_head.weight) is nn.Parameter


@pytest.mark.parametrize("name", ["a.q_proj", "a.o_proj"])
@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (5,)])
def test_static_outputs_are_those_of_our_kernels(name: str, shape: tuple[int, ...]) -> None:
    """Inputs beyond the calibrated range clip alike. Ours round to bf16 at the end, so theirs."""
    plain, block, _ = quantized(torch.float32, input_dims=len(shape) + 1)
    linear = linear_of(plain, name)
    x = torch.randn(*shape, linear.in_features, generator=torch.Generator().manual_seed(1)) * 3
    x = x.bfloat16()
    assert float(x.abs().max()) > ABSMAX[name]
    parts = get_scheme("int8_static").quantize(linear.weight, absmax=ABSMAX[name])
    ours = Fp32Kernels().int8(parts["weight"], parts["weight_scale"], parts["input_scale"])
    theirs = linear_of(block, name)(x.float())
    assert torch.equal(ours.apply(x, linear.bias), theirs.bfloat16())


def test_dynamic_outputs_differ_by_the_documented_activation_scale() -> None:
    """Their token scale is absmax / 127.5: with it, integer arithmetic gives their output."""
    plain, block, _ = quantized(torch.float32)
    x = torch.randn(2, 3, 33, generator=torch.Generator().manual_seed(1))
    parts = get_scheme("int8_dynamic").quantize(linear_of(plain, "a.up_proj").weight)
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    codes = torch.round(x * (1 / scale)).clamp(-128, 127)
    y = (codes.double() @ parts["weight"].double().t()).float() * scale
    theirs = linear_of(block, "a.up_proj")(x)
    torch.testing.assert_close(theirs, y * parts["weight_scale"].t(), rtol=1e-6, atol=1e-7)
    ours = torch.round(x * (127.0 / x.abs().amax(-1, keepdim=True))).abs().amax()
    assert ours == 127


def test_stock_configs_give_torchaos_own_range() -> None:
    _, ours, layers = quantized(torch.float32)
    _, stock, _ = quantized(torch.float32, stock=True)
    for name, scheme in layers.items():
        if scheme == "bf16":
            continue
        mine, theirs = linear_of(ours, name).weight, linear_of(stock, name).weight
        live = mine.scale > 1e-6  # a zero row has the smallest scale in both
        torch.testing.assert_close(theirs.scale[live] * 127.5, mine.scale[live] * 127)
        assert int((theirs.qdata.int() - mine.qdata.int()).abs().max()) == 1


def test_what_cannot_be_said_is_named() -> None:
    with pytest.raises(QuantizationError, match=r"a\.o_proj: int8_static needs"):
        QuantPlan.to_fqn_config({"a.o_proj": "int8_static"}, {"a.q_proj": 1.0})
    with pytest.raises(QuantizationError, match="no config for scheme 'int7'"):
        QuantPlan.to_fqn_config({"x": "int7"})
    config = QuantPlan.to_fqn_config({"x": "int8_dynamic", "y": "bf16"}).fqn_to_config
    assert isinstance(config["x"], Int8DynamicActivationInt8WeightConfig)
    assert config["y"] is None
