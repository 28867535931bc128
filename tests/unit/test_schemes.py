"""Every scheme against torchao's own int8 tensors and against its definition."""

import pytest
import torch
from torchao.quantization.granularity import PerRow
from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine
from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

from forge_ptq.numerics import plan
from forge_ptq.numerics.schemes import (
    PART_DTYPES,
    SCALE_MIN,
    SCHEMES,
    QuantizationError,
    get_scheme,
)

SHAPES = [(1, 1), (1, 7), (5, 1), (3, 5), (64, 64), (127, 129), (257, 96)]


def weight(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_codes_equal_torchao_modules(shape, dtype):
    w_NK = weight(shape, dtype)
    parts = get_scheme("int8_dynamic").quantize(w_NK)
    theirs = Int8Tensor.from_hp(w_NK, PerRow(), scale=parts["weight_scale"])
    assert torch.equal(parts["weight"], theirs.qdata)
    theirs_NK = theirs.dequantize(torch.float32)
    assert torch.equal(get_scheme("int8_dynamic").dequantize(parts), theirs_NK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchao_module_with_its_own_range_differs_only_by_the_documented_step(dtype):
    # torchao divides by 127.5; nothing else may differ.
    w_NK = weight((48, 80), dtype)
    theirs = Int8Tensor.from_hp(w_NK.float(), PerRow())
    ours_N1 = get_scheme("int8_dynamic").quantize(w_NK)["weight_scale"]
    torch.testing.assert_close(theirs.scale * 127.5, ours_N1 * 127, rtol=3e-7, atol=0)


def test_scale_is_absmax_over_127_in_fp32_even_for_bf16():
    w_NK = weight((32, 64), torch.bfloat16)
    scale_N1 = get_scheme("int8_static").quantize(w_NK, absmax=2.54)["weight_scale"]
    assert scale_N1.dtype == torch.float32
    assert torch.equal(scale_N1, w_NK.float().abs().amax(1, keepdim=True) / 127)


def test_static_activation_codes_equal_torchao():
    x_TK = weight((9, 33), torch.float32, seed=3)
    absmax = float(x_TK.abs().max())
    parts = get_scheme("int8_static").quantize(weight((4, 33), torch.float32), absmax=absmax)
    theirs_scale, _ = choose_qparams_affine(
        x_TK,
        MappingType.SYMMETRIC,
        tuple(x_TK.shape),
        torch.int8,
        quant_min=-127,
        quant_max=127,
        scale_dtype=torch.float32,
        zero_point_dtype=torch.int8,
    )
    assert parts["input_scale"].shape == (1,)
    assert torch.equal(parts["input_scale"], theirs_scale.reshape(1))


@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_at_most_half_a_step_and_no_code_is_minus_128(shape):
    w_NK = weight(shape, torch.float32, seed=1)
    parts = get_scheme("int8_dynamic").quantize(w_NK)
    error_NK = (get_scheme("int8_dynamic").dequantize(parts) - w_NK).abs()
    assert bool((error_NK <= parts["weight_scale"] * 0.5 * (1 + 1e-5)).all())
    assert int(parts["weight"].min()) >= -127
    assert bool((parts["weight"].abs().amax(1) == 127).all())


def test_zero_row_gets_the_smallest_scale_and_zero_codes():
    w_NK = weight((3, 8), torch.bfloat16)
    w_NK[1] = 0
    parts = get_scheme("int8_dynamic").quantize(w_NK)
    assert float(parts["weight_scale"][1]) == SCALE_MIN
    assert bool((parts["weight"][1] == 0).all())
    assert bool((parts["weight_scale"] > 0).all())


def test_non_contiguous_views_quantize_like_their_copy():
    w_NK = weight((40, 24), torch.float32).t()
    for scheme in SCHEMES.values():
        view = scheme.quantize(w_NK, absmax=1.0)
        copy = scheme.quantize(w_NK.contiguous(), absmax=1.0)
        assert all(torch.equal(view[part], copy[part]) for part in scheme.PARTS)
        assert all(tensor.is_contiguous() for tensor in view.values())


def test_parts_and_dtypes_are_as_declared():
    assert set(SCHEMES) == set(PART_DTYPES) == set(plan.SCHEME_NAMES)
    for name, scheme in SCHEMES.items():
        parts = scheme.quantize(weight((6, 10), torch.float32), absmax=1.0)
        assert tuple(parts) == scheme.PARTS
        assert {part: tensor.dtype for part, tensor in parts.items()} == PART_DTYPES[name]


def test_bf16_copies_so_that_a_later_optimizer_step_cannot_reach_it():
    w_NK = weight((4, 4), torch.bfloat16)
    kept = get_scheme("bf16").quantize(w_NK)["weight"]
    before = kept.clone()
    w_NK.add_(1)
    assert torch.equal(kept, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_non_finite_weight_is_refused_by_name(bad, scheme):
    w_NK = weight((4, 4), torch.bfloat16)
    w_NK[2, 1] = bad
    with pytest.raises(QuantizationError, match=r"layers\.3\.q_proj: 1 of 16"):
        get_scheme(scheme).quantize(w_NK, name="layers.3.q_proj", absmax=1.0)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(0, 4), "empty"),
        (torch.zeros(4), r"expected a weight of shape"),
        (torch.zeros(2, 2, 2), r"expected a weight of shape"),
        (torch.zeros(2, 2, dtype=torch.int8), "floating-point"),
    ],
)
def test_odd_tensors_are_refused(tensor, message):
    with pytest.raises(QuantizationError, match=message):
        get_scheme("int8_dynamic").quantize(tensor)


@pytest.mark.parametrize("absmax", [None, 0.0, -1.0, float("nan"), float("inf")])
def test_static_needs_a_usable_absmax(absmax):
    with pytest.raises(QuantizationError, match="o_proj"):
        get_scheme("int8_static").quantize(torch.ones(2, 2), name="o_proj", absmax=absmax)


def test_unknown_scheme_lists_the_known_ones():
    with pytest.raises(ValueError, match="int8_dynamic"):
        get_scheme("int7")
