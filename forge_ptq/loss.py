"""The GRPO loss: a policy gradient per token, a KL leash to the reference, a correction for
rollouts that were sampled from somewhat different weights.

Notation, all [B, R] over response tokens: `lp` trainer log-probabilities (with gradient), `gen`
those of the generator that sampled the tokens (quantized, perhaps some versions old), `ref`
those of the frozen reference, A the advantage [B, 1].

    policy term   -w * A * exp(lp - stop(lp))           gradient: -w * A * grad(lp)
    w             1                                      rollout_correction "none"
                  min(exp(stop(lp) - gen), tis_cap)      "tis": truncated importance sampling
    KL term       beta * (exp(ref - lp) - (ref - lp) - 1)      "k3" estimate of KL(policy || ref)

Without w the gradient is that of on-policy data, which a quantized generator does not deliver: w
restores the trainer's own expectation, and the cap bounds its variance (bias instead of noise where
the two disagree badly). w is a constant to autograd: it weights the gradient, it is not trained.

Aggregation. "sequence_mean": mean over the tokens of a response, then over responses, so each
response counts the same. "token_mean": every token counts the same. Both are sums divided by a
denominator of the whole step; `denominator` hands that in when a step is split into micro-batches
or over ranks, so that the parts add up to exactly the loss of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CORRECTIONS = ("none", "tis")
AGGREGATIONS = ("sequence_mean", "token_mean")


class LossOutput(NamedTuple):
    """Loss of a (micro-)batch and what it was made of."""

    loss: Tensor
    """Scalar fp32 with gradient."""
    sums: dict[str, Tensor]
    """Sums over unmasked tokens, scalars fp32: divide by sums["tokens"] for means."""
    maxima: dict[str, Tensor]
    """Maxima over unmasked tokens, scalars fp32; 0 where there are none."""


def token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """log p(token_ids[b, r]) under logits[b, r]: [B, R, V], [B, R] -> [B, R] fp32."""
    logits = logits.float()
    picked = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return picked - logits.logsumexp(-1)


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of each distribution: [B, R, V] -> [B, R] fp32, without gradient."""
    logprobs = F.log_softmax(logits.detach().float(), dim=-1)
    return -(logprobs.exp() * logprobs).sum(-1)


@dataclass(frozen=True)
class GRPOLoss:
    """Callable loss; its fields are the configuration's `loss` block."""

    beta: float = 0.1
    aggregation: str = "sequence_mean"
    rollout_correction: str = "tis"
    tis_cap: float = 2.0

    def __post_init__(self) -> None:
        if self.rollout_correction not in CORRECTIONS:
            raise ValueError(
                f"loss.rollout_correction: {self.rollout_correction!r}; expected {CORRECTIONS}"
            )
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(f"loss.aggregation: {self.aggregation!r}; expected {AGGREGATIONS}")
        if not self.tis_cap > 0:
            raise ValueError(f"loss.tis_cap: {self.tis_cap}; expected a number above 0")
        if not self.beta >= 0:
            raise ValueError(f"loss.beta: {self.beta}; expected 0 or more")

    def weight(self, padding_mask: Tensor) -> float:
        """What a batch adds to the denominator: its tokens, or its responses that have any."""
        if self.aggregation == "token_mean":
            return float(padding_mask.sum())
        return float(padding_mask.any(dim=1).sum())

    def __call__(
        self,
        logits: Tensor,
        response: Tensor,
        ref_logprobs: Tensor,
        advantages: Tensor,
        padding_mask: Tensor,
        generator_logprobs: Tensor | None = None,
        *,
        denominator: float | None = None,
    ) -> LossOutput:
        """Loss of a batch.

        Args:
            logits: [B, R, V], any float type; position r scores response token r.
            response: [B, R] int64 token ids.
            ref_logprobs: [B, R] log-probabilities of the reference.
            advantages: [B, 1].
            padding_mask: [B, R] bool, true on real response tokens.
            generator_logprobs: [B, R] log-probabilities of the generator; needed for "tis".
            denominator: see the module's docstring; None takes this batch's own `weight`.
        """
        mask = padding_mask.bool()
        # Padding of the log-probabilities may hold anything: NaN * 0 is NaN, so fill, not multiply.
        logprobs = token_logprobs(logits, response).masked_fill(~mask, 0.0)
        ref = ref_logprobs.float().masked_fill(~mask, 0.0)
        advantages = advantages.float()

        correction, ratio, gap = self._correction(logprobs.detach(), generator_logprobs, mask)
        policy = -correction * advantages * torch.exp(logprobs - logprobs.detach())
        kl = torch.exp(ref - logprobs) - (ref - logprobs) - 1
        per_token = (policy + self.beta * kl).masked_fill(~mask, 0.0)
        if self.aggregation == "sequence_mean":
            total = (per_token.sum(1) / mask.sum(1).clamp(min=1)).sum()
        else:
            total = per_token.sum()
        loss = total / max(self.weight(mask) if denominator is None else denominator, 1.0)

        with torch.no_grad():
            tokens = mask.sum().float()
            sums = {
                "tokens": tokens,
                "kl_ref": kl.masked_fill(~mask, 0.0).sum(),
                "policy_loss": policy.masked_fill(~mask, 0.0).sum(),
                "entropy": entropy(logits).masked_fill(~mask, 0.0).sum(),
                "logprob": logprobs.sum(),
            }
            maxima: dict[str, Tensor] = {}
            if gap is not None and ratio is not None:
                # Over tokens sampled by the generator: both estimate KL(generator || trainer).
                sums["mismatch_k1"] = -gap.sum()
                sums["mismatch_k3"] = (torch.exp(gap) - gap - 1).sum()
                sums["ratio"] = ratio.masked_fill(~mask, 0.0).sum()
                sums["ratio_capped"] = ((ratio > self.tis_cap) & mask).sum().float()
                maxima["ratio_max"] = (
                    ratio.masked_fill(~mask, 0.0).amax() if ratio.numel() else tokens
                )
        return LossOutput(loss, sums, maxima)

    def _correction(
        self, logprobs: Tensor, generator_logprobs: Tensor | None, mask: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(w, trainer over generator probability, log of that); the latter two without generator
        log-probabilities are None."""
        if generator_logprobs is None:
            if self.rollout_correction == "tis":
                raise ValueError("loss.rollout_correction tis needs generator_logprobs")
            return torch.ones_like(logprobs), None, None
        gap = (logprobs - generator_logprobs.float()).masked_fill(~mask, 0.0)
        ratio = torch.exp(gap)
        if self.rollout_correction == "tis":
            return ratio.clamp(max=self.tis_cap), ratio, gap
        return torch.ones_like(ratio), ratio, gap
