"""Which tokens of a rollout count in the loss, and with what weight.

The tokens were sampled by a generator whose policy is not quite the trainer's: quantized, perhaps
some versions old. `gap` [B, R] is the trainer's log-probability of each minus the generator's, of
the distribution that was sampled; ratio = exp(gap) is its importance ratio.

    none             weight 1
    tis              min(ratio, cap): truncated importance sampling per token [1]
    sequence_tis     min(exp(mean gap), cap) on every token of the sequence. The mean, not the sum:
                     the ratio of whole sequences leaves every bound as they grow long [2]
    icepop           ratio where low <= ratio <= high, elsewhere the token is left out [3]
    geometric_mask   sequences with exp(mean gap) outside [low, high] are left out; weight 1, or
                     another correction's [4]

Before these, and whatever they are: a sequence is *rejected* if one of its log-probabilities is not
finite (its gradient needs every token's), and *vetoed* if one token's ratio is under `veto_ratio`:
the generator sampled what the trainer all but excludes, so what follows it is off the trainer's
path too [4].

A token that is left out is gone from numerator and denominator alike, as if it had not been
sampled: the rest is not diluted [4]. Weights and masks are constants to autograd.

[1] Yao et al., Your efficient RL framework secretly brings you off-policy RL training, 2025.
[2] Zheng et al., Group sequence policy optimization, 2025 (arXiv:2507.18071), eq. 7.
[3] Ling team, Every step evolves, 2025 (arXiv:2510.18855), IcePop with low 0.5 and high 5. There
    tokens outside stay in the denominator.
[4] Liu, Li et al., When speed kills stability, 2025, and verl's "rollout correction".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from forge_ptq.config.loss import LossConfig
from forge_ptq.mismatch import MAX_GAP


class Corrected(NamedTuple):
    """What a correction says of each token, all [B, R]. `kept`, `masked`, `vetoed` and `rejected`
    are bool and part the response tokens among them; padding is in none."""

    weight: Tensor
    """fp32 factor of the policy term, constant to autograd; 1 where the token is not kept."""
    kept: Tensor
    masked: Tensor
    vetoed: Tensor
    rejected: Tensor
    capped: Tensor
    """bool: kept tokens whose weight was truncated."""


def correct(gap_BR: Tensor, response_BR: Tensor, finite_BR: Tensor, rules: LossConfig) -> Corrected:
    """The correction that `rules` asks for.

    Args:
        gap_BR: [B, R] fp32, nats; anything where a token is padding or not finite.
        response_BR: [B, R] bool, true on response tokens.
        finite_BR: [B, R] bool, true where every log-probability of the token is finite.
        rules: a checked `loss` block.
    """
    broken = (response_BR & ~finite_BR).any(1, keepdim=True)
    rejected = response_BR & broken
    valid = response_BR & ~broken
    gap = gap_BR.detach().float().masked_fill(~valid, 0.0)

    vetoed = torch.zeros_like(valid)
    if rules.veto_ratio is not None:
        vetoed = valid & (gap < math.log(rules.veto_ratio)).any(1, keepdim=True)

    ratio = gap.clamp(-MAX_GAP, MAX_GAP).exp()
    mean_gap_B1 = gap.sum(1, keepdim=True) / valid.sum(1, keepdim=True).clamp(min=1)
    sequence_ratio = mean_gap_B1.clamp(-MAX_GAP, MAX_GAP).exp().expand_as(gap)

    weight, inside = torch.ones_like(gap), torch.ones_like(valid)
    capped = torch.zeros_like(valid)
    for name in rules.corrections():
        if name in ("tis", "sequence_tis"):
            whole = ratio if name == "tis" else sequence_ratio
            weight, capped = whole.clamp(max=rules.tis_cap), whole > rules.tis_cap
        elif name == "icepop":
            weight = ratio
            inside &= (ratio >= rules.icepop_low) & (ratio <= rules.icepop_high)
        else:
            inside &= sequence_ratio >= rules.geometric_low
            inside &= sequence_ratio <= rules.geometric_high
    kept = valid & ~vetoed & inside
    return Corrected(
        weight=weight.masked_fill(~kept, 1.0),
        kept=kept,
        masked=valid & ~vetoed & ~inside,
        vetoed=vetoed,
        rejected=rejected,
        capped=capped & kept,
    )
