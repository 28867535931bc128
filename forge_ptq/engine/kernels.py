"""How one linear is prepared and run, per device: the only file that knows kernels.

A ``LinearKernels`` turns a weight into a ``PreparedLinear``; a slot is nothing but one prepared
linear per layer. The maths is the same everywhere (symmetric, N output rows, K inputs):

    int8:  y_MN = (q_MK @ w_NK.T) * s_M * ws_N + b_N,  q = clamp(round(x / s), -128, 127)
           s_M = max|x_M| / 127 per token (dynamic), or one calibrated input_scale (static)
    bf16:  y_MN = x_MK @ w_NK.T + b_N, accumulated in fp32

Which kernel runs is decided by what was seen to work, not by a flag alone, because vLLM's CPU
build runs everywhere but is right only in places:

- ``OneDnnKernels`` needs AVX512-VNNI (or AMX). Without VNNI oneDNN multiplies int8 by
  ``vpmaddubsw``, whose 16-bit sums saturate for large weights (errors of 10-25 % of the result,
  silently), and runs static scales in its reference code, some 500 times slower. With AMX vLLM
  itself would choose another kernel that ignores static input scales; this class always takes
  oneDNN, which uses them.
- ``Fp32Kernels`` is for the other CPUs: the int8 integers are kept as fp32, so that products are
  exact and sums are exact up to K = 1040 and rounded in the 24th bit beyond. Four bytes a weight.
- ``CudaKernels`` is written against vLLM's operators and has not been run on a GPU yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from vllm import _custom_ops as ops
from vllm.logger import init_logger

logger = init_logger("vllm.forge_ptq.kernels")


class PreparedLinear(ABC):
    """One layer's weights in the form its kernel wants. ``nbytes`` is what it keeps allocated."""

    scheme: str
    nbytes: int

    @abstractmethod
    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., K] bf16 -> [..., N] of x's dtype; bias [N] of x's dtype or None."""

    def scale_rows(self, begin: int, end: int, factor: float) -> None:
        """Debug: multiply the weight scales of output rows [begin, end) in place."""
        raise NotImplementedError(f"{self.scheme} linears have no weight scales")


class LinearKernels(ABC):
    """Prepares linears for one kind of device."""

    name: str

    @abstractmethod
    def int8(
        self, weight_NK: torch.Tensor, scale_N1: torch.Tensor, input_scale_1: torch.Tensor | None
    ) -> PreparedLinear:
        """int8 [N, K] with fp32 [N, 1]; dynamic per token where ``input_scale_1`` is None."""

    @abstractmethod
    def bf16(self, weight_NK: torch.Tensor) -> PreparedLinear:
        """Full-precision linear of a bf16 [N, K] weight."""


def _int8_scheme(input_scale_1: torch.Tensor | None) -> str:
    return "int8_dynamic" if input_scale_1 is None else "int8_static"


class _OneDnnInt8(PreparedLinear):
    def __init__(
        self, weight_NK: torch.Tensor, scale_N1: torch.Tensor, input_scale_1: torch.Tensor | None
    ) -> None:
        self.scheme = _int8_scheme(input_scale_1)
        # oneDNN keeps a pointer to the scales: they must live as long as the handler.
        self._scale_N1 = scale_N1.to(torch.float32).contiguous().clone()
        self._input_scale_1 = None if input_scale_1 is None else input_scale_1.reshape(1).clone()
        self._handler = ops.create_onednn_scaled_mm(
            weight_NK.contiguous().t(),
            self._scale_N1,
            torch.bfloat16,
            input_scale_1 is None,
            False,
            32,
        )
        self.nbytes = weight_NK.numel() + 4 * scale_N1.numel()

    def scale_rows(self, begin: int, end: int, factor: float) -> None:
        self._scale_N1[begin:end] *= factor

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        x_MK = x.reshape(-1, x.shape[-1])
        q_MK, s_M1, _ = ops.onednn_scaled_int8_quant(x_MK, self._input_scale_1, None, True)
        out_MN = x.new_empty(x_MK.shape[0], self._handler.n)
        ops.onednn_scaled_mm(self._handler, q_MK, out_MN, s_M1, None, None, bias)
        return out_MN.reshape(*x.shape[:-1], self._handler.n)


class _OneDnnBf16(PreparedLinear):
    scheme = "bf16"

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self._handler = ops.create_onednn_mm(weight_NK.contiguous().t(), 32)
        self.nbytes = 2 * weight_NK.numel()

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return ops.onednn_mm(self._handler, x, bias)


class OneDnnKernels(LinearKernels):
    """x86 CPUs with AVX512-VNNI: prepacked oneDNN handlers, static input scales always used."""

    name = "onednn"

    def int8(
        self, weight_NK: torch.Tensor, scale_N1: torch.Tensor, input_scale_1: torch.Tensor | None
    ) -> PreparedLinear:
        return _OneDnnInt8(weight_NK, scale_N1, input_scale_1)

    def bf16(self, weight_NK: torch.Tensor) -> PreparedLinear:
        return _OneDnnBf16(weight_NK)


class _Fp32Int8(PreparedLinear):
    def __init__(
        self, weight_NK: torch.Tensor, scale_N1: torch.Tensor, input_scale_1: torch.Tensor | None
    ) -> None:
        self.scheme = _int8_scheme(input_scale_1)
        self._weight_NK = weight_NK.to(torch.float32)
        self._scale_N = scale_N1.to(torch.float32).reshape(-1).clone()
        self._input_scale_1 = None if input_scale_1 is None else input_scale_1.reshape(1).clone()
        self.nbytes = 4 * weight_NK.numel() + 4 * scale_N1.numel()

    def scale_rows(self, begin: int, end: int, factor: float) -> None:
        self._scale_N[begin:end] *= factor

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        x_MK = x.reshape(-1, x.shape[-1])
        q_MK, s_M1, _ = ops.onednn_scaled_int8_quant(x_MK, self._input_scale_1, None, True)
        y_MN = F.linear(q_MK.to(torch.float32), self._weight_NK)
        y_MN.mul_(s_M1).mul_(self._scale_N)
        if bias is not None:
            y_MN.add_(bias)
        return y_MN.to(x.dtype).reshape(*x.shape[:-1], -1)


class _Fp32Bf16(PreparedLinear):
    scheme = "bf16"

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self._weight_NK = weight_NK.to(torch.float32)
        self.nbytes = 4 * weight_NK.numel()

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        bias_f = None if bias is None else bias.to(torch.float32)
        return F.linear(x.to(torch.float32), self._weight_NK, bias_f).to(x.dtype)


class Fp32Kernels(LinearKernels):
    """CPUs without VNNI: exact integers in fp32 GEMMs. Correct, and faster there than the rest."""

    name = "fp32_exact"

    def int8(
        self, weight_NK: torch.Tensor, scale_N1: torch.Tensor, input_scale_1: torch.Tensor | None
    ) -> PreparedLinear:
        return _Fp32Int8(weight_NK, scale_N1, input_scale_1)

    def bf16(self, weight_NK: torch.Tensor) -> PreparedLinear:
        return _Fp32Bf16(weight_NK)


class _CudaInt8(PreparedLinear):
    def __init__(
        self, weight_NK: torch.Tensor, scale_N1: torch.Tensor, input_scale_1: torch.Tensor | None
    ) -> None:
        self.scheme = _int8_scheme(input_scale_1)
        self._weight_KN = weight_NK.contiguous().t()  # column-major, as CUTLASS wants it
        self._scale_N1 = scale_N1.to(torch.float32).contiguous()
        self._input_scale_1 = None if input_scale_1 is None else input_scale_1.reshape(1)
        self.nbytes = weight_NK.numel() + 4 * scale_N1.numel()

    def scale_rows(self, begin: int, end: int, factor: float) -> None:
        self._scale_N1[begin:end] *= factor

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        x_MK = x.reshape(-1, x.shape[-1]).contiguous()
        q_MK, s_M1, _ = ops.scaled_int8_quant(x_MK, self._input_scale_1, None, True)
        y_MN = ops.cutlass_scaled_mm(
            q_MK,
            self._weight_KN,
            scale_a=s_M1,
            scale_b=self._scale_N1,
            out_dtype=x.dtype,
            bias=bias,
        )
        return y_MN.reshape(*x.shape[:-1], -1)


class _TorchBf16(PreparedLinear):
    scheme = "bf16"

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self._weight_NK = weight_NK.contiguous()
        self.nbytes = 2 * weight_NK.numel()

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self._weight_NK, bias)


class CudaKernels(LinearKernels):
    """CUDA devices: vLLM's scaled_int8_quant and cutlass_scaled_mm. Untested on a GPU so far."""

    name = "cutlass_untested"

    def int8(
        self, weight_NK: torch.Tensor, scale_N1: torch.Tensor, input_scale_1: torch.Tensor | None
    ) -> PreparedLinear:
        return _CudaInt8(weight_NK, scale_N1, input_scale_1)

    def bf16(self, weight_NK: torch.Tensor) -> PreparedLinear:
        return _TorchBf16(weight_NK)


def exactness(kernels: LinearKernels, *, peak: int = 127) -> float:
    """Largest relative error of the int8 linears on the integers most likely to overflow.

    Weights and activations reach +-``peak``; the result is compared with int64 arithmetic and
    normalised by the largest output. About 0.004 is bf16 rounding; more is a wrong kernel.
    """
    generator = torch.Generator().manual_seed(0)
    w_NK = torch.randint(-peak, peak + 1, (48, 192), generator=generator, dtype=torch.int8)
    w_NK[:, ::2] = peak  # long runs of one sign: what saturating 16-bit sums cannot hold
    ws_N1 = torch.rand(48, 1, generator=generator, dtype=torch.float32) + 0.5
    q_MK = torch.randint(-127, 128, (5, 192), generator=generator, dtype=torch.int32)
    q_MK[:, 0] = 127  # so that the dynamic scale of every row is exactly 1
    y_MN = (q_MK.long() @ w_NK.long().t()).double() * ws_N1.double().t()
    worst = 0.0
    for input_scale in (None, torch.ones(1, dtype=torch.float32)):
        got = kernels.int8(w_NK, ws_N1, input_scale).apply(q_MK.to(torch.bfloat16), None)
        worst = max(worst, float((got.double() - y_MN).abs().max() / y_MN.abs().max()))
    return worst


def select_kernels(device: torch.device) -> LinearKernels:
    """The kernels for a device; on CPU, oneDNN only where VNNI exists and its results are right."""
    if device.type == "cuda":
        kernels: LinearKernels = CudaKernels()
        logger.warning("forge_slots: kernel %s on %s", kernels.name, device)
        return kernels
    if device.type != "cpu":
        raise RuntimeError(f"forge_slots: device {device}: only cpu and cuda have kernels")
    if torch.cpu._is_vnni_supported():
        kernels = OneDnnKernels()
        error = exactness(kernels)
        if error < 0.01:
            logger.info("forge_slots: kernel %s, int8 self-test error %.4f", kernels.name, error)
            return kernels
        logger.warning("forge_slots: oneDNN int8 is off by %.3f here, not used", error)
    kernels = Fp32Kernels()
    logger.warning(
        "forge_slots: kernel %s: no usable VNNI on this CPU, int8 weights are kept as fp32 integers"
        " (right, but not smaller than bf16)",
        kernels.name,
    )
    return kernels
