"""Linear kernels against plain integer arithmetic, on shapes and values that break kernels."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from forge_ptq.engine.kernels import (
    CudaKernels,
    Fp32Kernels,
    LinearKernels,
    OneDnnKernels,
    exactness,
    select_kernels,
)
from forge_ptq.services.policy_evaluate import FakeQuantizedLinear

SHAPES = [(1, 7, 5), (1, 33, 17), (5, 1, 64), (3, 48, 100), (17, 130, 129), (1, 96, 1536)]


def quantize_rows(x_MK: torch.Tensor, scale_1: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """(q int64 [M, K], s fp32 [M, 1]) as the schemes define them; all-zero rows give zeros."""
    x_MK = x_MK.float()
    s_M1 = (
        x_MK.abs().amax(1, keepdim=True) / 127 if scale_1 is None else scale_1.expand(len(x_MK), 1)
    )
    q_MK = torch.where(s_M1 > 0, torch.round(x_MK * (1 / s_M1)), torch.zeros(()))
    return q_MK.clamp(-128, 127).long(), s_M1


def reference(
    x_MK: torch.Tensor,
    w_NK: torch.Tensor,
    ws_N1: torch.Tensor,
    scale_1: torch.Tensor | None,
    bias_N: torch.Tensor | None,
) -> torch.Tensor:
    """fp64 result of exact integer sums."""
    q_MK, s_M1 = quantize_rows(x_MK, scale_1)
    y_MN = (q_MK @ w_NK.long().t()).double() * s_M1.double() * ws_N1.double().t()
    return y_MN if bias_N is None else y_MN + bias_N.double()


def kernels_here() -> list[LinearKernels]:
    """Those that are right on this CPU at full range."""
    chosen = select_kernels(torch.device("cpu"))
    return [Fp32Kernels()] if isinstance(chosen, Fp32Kernels) else [Fp32Kernels(), chosen]


@pytest.mark.parametrize("kernels", kernels_here(), ids=lambda k: k.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", ["static", "dynamic"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_int8_equals_integer_arithmetic(
    kernels: LinearKernels, shape: tuple[int, int, int], scheme: str, with_bias: bool
) -> None:
    """Zero rows, an outlier of 3000 and full-range weights included."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(m + n + k)
    x_MK = torch.randn(m, k, generator=generator).bfloat16()
    x_MK[0, 0] = 3000.0
    if m > 2:
        x_MK[1] = 0.0
    w_NK = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator)
    ws_N1 = torch.rand(n, 1, generator=generator) * 0.01 + 1e-4
    bias_N = torch.randn(n, generator=generator).bfloat16() if with_bias else None
    scale_1 = torch.tensor([0.03]) if scheme == "static" else None
    prepared = kernels.int8(w_NK, ws_N1, scale_1)
    got = prepared.apply(x_MK, bias_N)
    want = reference(x_MK, w_NK, ws_N1, scale_1, bias_N)
    assert got.dtype == torch.bfloat16
    assert prepared.scheme == f"int8_{scheme}"
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_evaluator_computes_the_same_integers(scheme: str, dtype: torch.dtype) -> None:
    """Bit for bit: edges between integers, clipping to -128, tokens tiny or of zeros."""
    generator = torch.Generator().manual_seed(3)
    w_NK = torch.randint(-127, 128, (16, 129), dtype=torch.int8, generator=generator)
    ws_N1 = torch.rand(16, 1, generator=generator) * 0.01 + 1e-4
    for scale in (0.03, 0.0117, 0.00713):
        half_MK = torch.randint(-140, 140, (40, 129), generator=generator) + 0.5
        x_MK = (half_MK * scale).to(dtype)
        x_MK[0], x_MK[1] = 0.0, x_MK[1] * 1e-6
        scale_1 = torch.tensor([scale]) if scheme == "static" else None
        served = Fp32Kernels().int8(w_NK, ws_N1, scale_1).apply(x_MK, None)
        simulated = FakeQuantizedLinear(w_NK, ws_N1, None, None, scale_1, ws_N1)(x_MK)
        assert torch.equal(simulated, served)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bf16_linear(shape: tuple[int, int, int]) -> None:
    """bf16 slots accumulate in fp32."""
    m, n, k = shape
    x_MK, w_NK = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    bias_N = torch.randn(n).bfloat16()
    got = select_kernels(torch.device("cpu")).bf16(w_NK).apply(x_MK, bias_N)
    want = x_MK.double() @ w_NK.double().t() + bias_N.double()
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=0.03)


def test_leading_dimensions_are_kept() -> None:
    """[..., K] in, [..., N] out."""
    prepared = Fp32Kernels().int8(torch.ones(3, 8, dtype=torch.int8), torch.ones(3, 1), None)
    assert prepared.apply(torch.ones(2, 5, 8).bfloat16(), None).shape == (2, 5, 3)


def test_self_test_sees_saturation() -> None:
    """The chosen kernel is right; oneDNN without VNNI is not, and the self-test must say so."""
    assert exactness(select_kernels(torch.device("cpu"))) < 0.01
    if not torch.cpu._is_vnni_supported():
        assert exactness(OneDnnKernels()) > 0.05
    assert exactness(OneDnnKernels(), peak=40) < 0.01  # small weights saturate nowhere


def test_devices_without_kernels_are_refused() -> None:
    """cpu and cuda only; cuda says that it is untested."""
    with pytest.raises(RuntimeError, match="only cpu and cuda"):
        select_kernels(torch.device("meta"))
    assert isinstance(select_kernels(torch.device("cuda")), CudaKernels)


def test_static_scale_is_used() -> None:
    """Values beyond the calibrated range are clamped, which a dynamic kernel would not do."""
    w_NK, ws_N1 = torch.full((1, 1), 127, dtype=torch.int8), torch.ones(1, 1) / 127
    x_MK = torch.tensor([[10.0]]).bfloat16()
    prepared = select_kernels(torch.device("cpu")).int8(w_NK, ws_N1, torch.tensor([1 / 127]))
    assert prepared.apply(x_MK, None).item() == pytest.approx(1.0, rel=0.01)
