"""What a quantized policy would say: the served arithmetic, simulated on the full-precision copy.

    evaluator = Evaluator(policy, rollouts, shift)
    scores = evaluator.scores(layers, ranges)      # layers: {name: scheme}, ranges: {name: absmax}

Every quantized linear computes what the engine's CPU kernels compute from the same x, on the same
integers (``engine.kernels``):

    y_MN = (q_MK @ codes_NK.T) * s_M * scale_N + b_N,   q = clamp(round(x * (1 / s)), -128, 127)

with x divided by the smoothing factors, s = range / 127 (static) or max|x_M| / 127 per token
(dynamic), and the codes that an artifact would hold. The reciprocal matters: a value on the edge
between two integers goes another way than by division. Integers are carried as fp32, whose products
are exact and whose sums are exact up to K = 1040 and rounded in the 24th bit beyond. Producers of
smoothed inputs need no folding here: their factors are powers of two, which change the exponents
of their scales and none of their codes. Layers left in bf16 run as the reference does.

Shape suffixes: B sequences, T positions, R response tokens, H hidden, V vocabulary, M tokens, N
output and K input features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from forge_ptq.numerics.divergence import kl_from_logprobs
from forge_ptq.numerics.plan import group_of
from forge_ptq.numerics.schemes import INT8_MAX, INT8_MIN
from forge_ptq.numerics.schemes.common import activation_scale, quantize_weight
from forge_ptq.numerics.smoothing import factors
from forge_ptq.numerics.stats_table import channel_slice
from forge_ptq.services.policy_batches import Sequence_
from forge_ptq.services.policy_quantize import full, static_ranges
from forge_ptq.services.policy_tp import linear_part

if TYPE_CHECKING:
    from forge_ptq.services.policy_copy import PolicyCopy

TINY = torch.finfo(torch.float32).tiny
"""Smallest scale with a finite reciprocal."""

VOCAB_BLOCK = 4096
"""Rows of lm_head taken to fp32 at a time."""

LOGIT_ELEMENTS = 8_000_000
"""Logits held at a time, per side."""


@dataclass
class Scores:
    """Per rollout, one value per response token, fp32 [R]."""

    kl_GR: list[torch.Tensor] = field(default_factory=list)
    """KL(reference || candidate) over the whole vocabulary; negative only by rounding."""
    logprobs_GR: list[torch.Tensor] = field(default_factory=list)
    """Of the rollout's tokens, under the candidate."""
    reference_GR: list[torch.Tensor] = field(default_factory=list)
    """The same under the full-precision policy."""


class FakeQuantizedLinear:
    """Stands in for the forward of one nn.Linear; see the module's docstring.

    like: the linear's own weight. If it is sharded over ranks, the whole tensors given are cut the
    same way, and x comes and y leaves as the DTensors of torch's tensor-parallel styles.
    """

    def __init__(
        self,
        codes_NK: torch.Tensor,
        scale_N1: torch.Tensor,
        bias_N: torch.Tensor | None,
        inverse_K: torch.Tensor | None,
        input_scale_1: torch.Tensor | None,
        like: torch.Tensor,
    ) -> None:
        self.codes_NK, self.scale_N, self.bias_N = codes_NK, scale_N1.squeeze(1), bias_N
        self.inverse_K = inverse_K
        self.input_scale_1 = input_scale_1
        self.part = part = linear_part(like)
        self.mesh = getattr(like, "device_mesh", None)
        if part.by == "output":
            rows = channel_slice(codes_NK.shape[0], part.rank, part.ranks)
            self.codes_NK, self.scale_N = codes_NK[rows], self.scale_N[rows]
            self.bias_N = None if bias_N is None else bias_N[rows]
        elif part.by == "input":
            columns = part.input_slice(codes_NK.shape[1])
            self.codes_NK = codes_NK[:, columns]
            self.inverse_K = None if inverse_K is None else inverse_K[columns]
            self.bias_N = bias_N if part.rank == 0 else None  # ranks are summed up

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.mesh is None:
            return self._compute(x)
        from torch.distributed.tensor import DTensor, Partial, Shard

        assert isinstance(x, DTensor)
        y = self._compute(x.to_local())
        placement = Shard(y.dim() - 1) if self.part.by == "output" else Partial()
        return DTensor.from_local(y, self.mesh, [placement], run_check=False)

    def _largest(self, x_MK: torch.Tensor) -> torch.Tensor:
        """max|x| of every token, of channels on other ranks too."""
        amax_M1 = x_MK.abs().amax(-1, keepdim=True)
        if self.mesh is not None and self.part.by == "input":
            import torch.distributed as dist

            dist.all_reduce(amax_M1, dist.ReduceOp.MAX, group=self.mesh.get_group())
        return amax_M1

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        x_MK = x.reshape(-1, x.shape[-1]).to(torch.float32)
        if self.inverse_K is not None:
            x_MK = x_MK * self.inverse_K
        s_M1 = self.input_scale_1
        if s_M1 is None:
            # For a token of zeros the engine has void codes and scale 0: y is 0 either way.
            s_M1 = (self._largest(x_MK) / INT8_MAX).clamp(min=TINY)
        q_MK = (x_MK * s_M1.reciprocal()).round_().clamp_(INT8_MIN, INT8_MAX)
        y_MN = F.linear(q_MK, self.codes_NK.to(torch.float32))
        y_MN.mul_(s_M1).mul_(self.scale_N)
        if self.bias_N is not None:
            y_MN.add_(self.bias_N)
        return y_MN.to(x.dtype).reshape(*x.shape[:-1], -1)


class Evaluator:
    """Scores plans on the same rollouts; int8 codes and reference states are kept in between.

    shift: log2 smoothing factors per site, int8 [C]. Floating ones are taken as they are, for
    experiments; only whole ones fold exactly. hidden_GRH: ``policy.reference(rollouts)``, computed
    if not given. The policy's version must not change while the evaluator lives.
    """

    def __init__(
        self,
        policy: PolicyCopy,
        rollouts: Sequence[Sequence_],
        shift: Mapping[str, torch.Tensor] | None = None,
        hidden_GRH: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.policy = policy
        self.rollouts = rollouts
        self.shift = dict(shift or {})
        self.hidden_GRH = policy.reference(rollouts) if hidden_GRH is None else hidden_GRH
        self._version = policy.version
        self._codes: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def scores(self, layers: Mapping[str, str], ranges: Mapping[str, float]) -> Scores:
        """Forward the rollouts through the policy quantized as ``layers`` says.

        ranges: |x| per layer that a static scale maps to 127 (of the smoothed input); a static
        group without one is dynamic, as in ``quantize``. QuantizationError names bad weights.
        """
        if self.policy.version != self._version:
            raise ValueError(
                f"the evaluator is for version {self._version}, loaded is {self.policy.version}"
            )
        with self._quantized(layers, ranges):
            candidate_GRH = self.policy.reference(self.rollouts)
        scores = Scores()
        sides = zip(self.rollouts, candidate_GRH, self.hidden_GRH, strict=True)
        for rollout, candidate_RH, reference_RH in sides:
            targets_R = torch.tensor(rollout.token_ids[rollout.response_start :])
            kl_R, logprobs_R, expected_R = self._compare(candidate_RH, reference_RH, targets_R)
            scores.kl_GR.append(kl_R)
            scores.logprobs_GR.append(logprobs_R)
            scores.reference_GR.append(expected_R)
        return scores

    @contextmanager
    def _quantized(self, layers: Mapping[str, str], ranges: Mapping[str, float]) -> Iterator[None]:
        used, _, limits = static_ranges(layers, ranges)
        patched: list[nn.Module] = []
        try:
            for name, scheme in used.items():
                if scheme == "bf16":
                    continue
                module = self.policy.model.get_submodule(name)
                # An instance attribute shadows the class's forward; hooks still run around it.
                module.forward = self._linear(name, module, limits.get(name))
                patched.append(module)
            yield
        finally:
            for module in patched:
                del module.forward

    def _linear(self, name: str, module: Any, absmax: float | None) -> FakeQuantizedLinear:
        shift_K = self._shift_of(name)
        if name not in self._codes:
            weight_NK = full(module.weight)
            if shift_K is not None:
                weight_NK = weight_NK.to(torch.float32) * factors(shift_K).to(weight_NK.device)
            self._codes[name] = quantize_weight(weight_NK, name)
        codes_NK, scale_N1 = self._codes[name]
        bias_N = None if module.bias is None else full(module.bias).to(torch.float32)
        inverse_K = None if shift_K is None else factors(-shift_K).to(codes_NK.device)
        scale_1 = None if absmax is None else activation_scale(absmax, name).to(codes_NK.device)
        return FakeQuantizedLinear(codes_NK, scale_N1, bias_N, inverse_K, scale_1, module.weight)

    def _shift_of(self, name: str) -> torch.Tensor | None:
        for member in group_of(name):
            if member in self.shift:
                return self.shift[member]
        return None

    @torch.no_grad()
    def _compare(
        self, candidate_RH: torch.Tensor, reference_RH: torch.Tensor, targets_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        head_VH = self.policy.head()
        rows = max(1, LOGIT_ELEMENTS // head_VH.shape[0])
        pieces = []
        for start in range(0, len(targets_R), rows):
            some = slice(start, start + rows)
            ref_RV = self._logprobs(reference_RH[some], head_VH)
            cand_RV = self._logprobs(candidate_RH[some], head_VH)
            picks_R1 = targets_R[some, None].to(ref_RV.device)
            pieces.append(
                (
                    kl_from_logprobs(reference_RV=ref_RV, candidate_RV=cand_RV).cpu(),
                    cand_RV.gather(1, picks_R1).squeeze(1).cpu(),
                    ref_RV.gather(1, picks_R1).squeeze(1).cpu(),
                )
            )
        kl, logprobs, reference = zip(*pieces, strict=True)
        return torch.cat(kl), torch.cat(logprobs), torch.cat(reference)

    def _logprobs(self, hidden_RH: torch.Tensor, head_VH: torch.Tensor) -> torch.Tensor:
        hidden_RH = hidden_RH.to(head_VH.device, torch.float32)
        logits_RV = hidden_RH.new_empty(len(hidden_RH), head_VH.shape[0])
        for start in range(0, head_VH.shape[0], VOCAB_BLOCK):
            block_BH = head_VH[start : start + VOCAB_BLOCK].to(torch.float32)
            logits_RV[:, start : start + VOCAB_BLOCK] = F.linear(hidden_RH, block_BH)
        config = self.policy.model.config
        if cap := getattr(config, "final_logit_softcapping", None):
            logits_RV = cap * torch.tanh(logits_RV / cap)
        scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
        return torch.log_softmax(logits_RV * scale if scale != 1 else logits_RV, dim=-1)
