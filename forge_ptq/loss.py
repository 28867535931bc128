"""The GRPO loss: a policy gradient per token, a KL leash to the reference, a correction for
rollouts that were sampled from somewhat different weights.

Notation, all [B, R] over response tokens, log-probabilities at the sampling temperature and fp32:
`lp` the trainer's (with gradient), `gen` those of the generator that sampled the tokens (quantized,
perhaps some versions old), `old` the trainer's before the batch's first optimizer step (`lp` itself
without gradient, where a batch gets one step), `ref` the frozen reference's; A [B, 1] advantages.

    policy term   -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)
    w             corrections.py: made from exp(old - gen); 1 without a correction
    r             exp(lp - old); its gradient where lp = old is that of lp: the policy gradient
    KL term       beta * (exp(d) - d - 1)  "k3" estimate of KL(policy || ref); d = ref - lp, held at
                  20 at most, beyond which it has no gradient

Without w the gradient is that of on-policy data, which a quantized generator does not deliver: w
restores the trainer's own expectation, and its cap bounds the variance.

Which ratio is clipped. Off-policy PPO has three policies: the generator, the proximal one that an
update must not leave, and the one being updated. Decoupled PPO (Hilton et al. 2021,
arXiv:2110.00641) clips r against the proximal policy, and w corrects from generator to proximal:
that is the formula above, `clip_against: proximal`. With one step per batch r is 1 and clips
nothing, so it takes a caller with several steps, who passes `old_logprobs`. `clip_against:
generator` is PPO as it was first written (Schulman et al. 2017, arXiv:1707.06347), which knows no
difference between the old policy and the one that sampled: r = exp(lp - gen), w = 1. Then r is the
importance weight, and clipping bounds how far the policy may move from what sampled the tokens.
`clip_high` over `clip_low` is the clip-higher of DAPO (arXiv:2503.14476).

Aggregation. "sequence_mean": mean over the tokens of a response, then over responses, so each
response counts the same. "token_mean": every token counts the same. "fixed_length": sum over the
tokens of a response by a constant, mean over responses (Dr. GRPO, arXiv:2503.20783): no response
counts less per token for being long. Tokens that a correction leaves out are in no sum and no
count, and a response without any token left is no response; tokens whose policy term is clipped
count. `denominator` hands in the count of the whole step when that is split into micro-batches or
over ranks, so that the parts add up. A step learns it only while it runs: dividing by anything else
first and scaling loss and gradients by the quotient in the end is the same, since both are linear.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_ptq.config.block import ConfigError
from forge_ptq.config.build import from_mapping
from forge_ptq.config.loss import LossConfig, loss_problems
from forge_ptq.corrections import Corrected, correct
from forge_ptq.mismatch import MAX_GAP, sequence_rows


class LossOutput(NamedTuple):
    """Loss of a (micro-)batch and what it was made of."""

    loss: Tensor
    """Scalar fp32 with gradient."""
    sums: dict[str, Tensor]
    """Sums over the tokens that count, scalars: divide by sums["tokens"] for means."""
    maxima: dict[str, Tensor]
    """Maxima over the tokens that count, scalars; 0 where there are none."""
    rows: Tensor | None = None
    """[B, len(mismatch.COLUMNS)] fp64, one row per sequence; None without the generator's
    log-probabilities."""
    denominator: Tensor | None = None
    """What this batch adds to the true denominator; None where `weight` tells it."""


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log p(token_ids[b, r]) under logits[b, r] / temperature: [B, R, V], [B, R] -> [B, R] fp32."""
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    picked = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return picked - logits.logsumexp(-1)


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of each distribution: [B, R, V] -> [B, R] fp32, without gradient."""
    probabilities = F.softmax(logits.detach().float() / temperature, dim=-1)
    return torch.special.entr(probabilities).sum(-1)


@dataclass(kw_only=True)
class GRPOLoss(LossConfig):
    """Callable loss; its fields are the configuration's `loss` block. ConfigError (a ValueError)
    names every field that is out of range or does not fit another."""

    def __post_init__(self) -> None:
        problems: list[tuple[str, str]] = []
        from_mapping(LossConfig, self.to_dict(), path="loss", problems=problems)
        if not problems:
            problems = loss_problems(self)
        if problems:
            raise ConfigError(problems, "GRPOLoss")

    def weight(self, padding_mask: Tensor) -> float:
        """The denominator of a batch of which every response token counts."""
        return float(self._denominator(padding_mask.bool()))

    def _denominator(self, kept_BR: Tensor) -> Tensor:
        if self.aggregation == "token_mean":
            return kept_BR.sum()
        responses = kept_BR.any(1).sum()
        if self.aggregation == "fixed_length":
            assert self.length_divisor is not None
            return responses * self.length_divisor
        return responses

    def __call__(
        self,
        logits: Tensor,
        response: Tensor,
        ref_logprobs: Tensor,
        advantages: Tensor,
        padding_mask: Tensor,
        generator_logprobs: Tensor | None = None,
        old_logprobs: Tensor | None = None,
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
            generator_logprobs: [B, R] log-probabilities of the generator, of the distribution it
                sampled; needed by every correction and by clipping against it.
            old_logprobs: [B, R] the trainer's before the batch's first step; None where this is it.
            denominator: see the module's docstring; None takes this batch's own.

        Anything may stand on padding. A response token that is not finite in one of the
        log-probabilities drops its sequence.
        """
        mask = padding_mask.bool()
        logprobs = token_logprobs(logits, response, self.temperature)
        finite = logprobs.detach().isfinite()
        if not finite.all():
            # The gradient of a softmax over NaN is NaN even where nothing depends on it.
            logits = logits.masked_fill(~finite.unsqueeze(-1), 0.0)
            logprobs = token_logprobs(logits, response, self.temperature)
        own = logprobs.detach()
        old = own if old_logprobs is None else old_logprobs.float()
        ref = ref_logprobs.float()
        gen = self._generator(generator_logprobs)
        compared = finite & old.isfinite() & (finite if gen is None else gen.isfinite())
        gap = torch.zeros_like(own) if gen is None else old - gen

        corrected = correct(gap, mask, compared & ref.isfinite(), self)
        kept = corrected.kept
        # NaN * 0 is NaN: what does not count is filled, not multiplied away.
        lp, old, ref = (t.masked_fill(~kept, 0.0) for t in (logprobs, old, ref))
        anchor = old if gen is None or not self._clips_generator else gen.masked_fill(~kept, 0.0)
        surrogate, clipped = self._surrogate(lp, anchor, advantages.float())
        policy = (-corrected.weight * surrogate).masked_fill(~kept, 0.0)
        # Unheld, one token's exp() can be infinite: a step lost, with beta = 0 to 0 * inf = NaN.
        apart = (ref - lp).clamp(max=MAX_GAP)
        kl = torch.exp(apart) - apart - 1
        per_token = policy + self.beta * kl
        if self.aggregation == "sequence_mean":
            total = (per_token.sum(1) / kept.sum(1).clamp(min=1)).sum()
        else:
            total = per_token.sum()
        own_denominator = self._denominator(kept)
        whole = own_denominator.clamp(min=1) if denominator is None else max(denominator, 1.0)
        loss = total / whole

        with torch.no_grad():
            sums = {
                "tokens": kept.sum().float(),
                "kl_ref": kl.sum(),
                "policy_loss": policy.sum(),
                "entropy": entropy(logits, self.temperature).masked_fill(~kept, 0.0).sum(),
                "logprob": lp.sum(),
                "ratio_capped": corrected.capped.sum().float(),
                "clipped": (clipped & kept).sum().float(),
            }
            rows = None if gen is None else _rows(gap, mask, compared, corrected)
        return LossOutput(loss, sums, {}, rows, own_denominator)

    @property
    def _clips(self) -> bool:
        return self.clip_low is not None or self.clip_high is not None

    @property
    def _clips_generator(self) -> bool:
        return self._clips and self.clip_against == "generator"

    def _generator(self, generator_logprobs: Tensor | None) -> Tensor | None:
        if generator_logprobs is not None:
            return generator_logprobs.float()
        if self.corrections() or self._clips_generator:
            key = "rollout_correction" if self.corrections() else "clip_against"
            raise ValueError(f"loss.{key}: {self[key]} needs generator_logprobs")
        return None

    def _surrogate(self, lp: Tensor, anchor: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """[B, R] clipped objective per token, to be maximised, and where clipping took hold."""
        ratio = (lp - anchor).clamp(-MAX_GAP, MAX_GAP).exp()
        plain = ratio * advantages
        if not self._clips:
            return plain, torch.zeros_like(plain, dtype=torch.bool)
        low = 0.0 if self.clip_low is None else 1 - self.clip_low
        high = math.inf if self.clip_high is None else 1 + self.clip_high
        bounded = ratio.clamp(low, high) * advantages
        return torch.minimum(plain, bounded), bounded < plain


def _rows(gap: Tensor, response: Tensor, compared: Tensor, corrected: Corrected) -> Tensor:
    return sequence_rows(
        gap,
        response,
        response & compared,
        corrected.masked,
        corrected.vetoed,
        corrected.rejected,
    )
