"""How far a candidate is from the full-precision policy, from per-token scores of rollouts.

Two estimates of the same thing, the relative rise in perplexity:

- from paired NLL: ``exp(mean(reference_logprob - candidate_logprob)) - 1`` over the tokens of the
  rollouts. Needs nothing but logprobs, but most of its variance is which tokens happened to be
  sampled.
- from the full-vocabulary divergence: ``exp(mean(KL(reference || candidate))) - 1``. On tokens
  sampled from the reference, KL is the expected NLL rise given the context, so the sampling noise
  of the token is gone: about 30 times less variance.

Tokens of one rollout are not independent, so errors are clustered by rollout: with s_G the sum and
n_G the number of tokens of each rollout, the mean is m = sum(s) / sum(n) and its variance
``G / (G - 1) * sum((s_g - m n_g)^2) / sum(n)^2`` (the ratio estimator's). Intervals use Student's
t with G - 1 degrees of freedom.

Shape suffixes: G rollouts (clusters), R scored tokens of one rollout, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Z_975 = 1.959963984540054
KL_ROUNDING = 1e-3
"""KL below minus this is an error; above it, zero as fp32 sums over a vocabulary see it."""


def kl_per_token(reference_RV: torch.Tensor, candidate_RV: torch.Tensor) -> torch.Tensor:
    """KL(reference || candidate) of two sets of logits over the vocabulary -> kl_R fp32, >= 0."""
    if reference_RV.shape != candidate_RV.shape:
        raise ValueError(
            f"logits differ in shape: {list(reference_RV.shape)}, {list(candidate_RV.shape)}"
        )
    return kl_from_logprobs(
        torch.log_softmax(reference_RV.to(torch.float32), dim=-1),
        torch.log_softmax(candidate_RV.to(torch.float32), dim=-1),
    ).clamp(min=0)


def kl_from_logprobs(reference_RV: torch.Tensor, candidate_RV: torch.Tensor) -> torch.Tensor:
    """The same from fp32 log-probabilities; rounding may take it a little below zero."""
    terms_RV = reference_RV.exp() * (reference_RV - candidate_RV)
    # A token that both give probability zero (logit -inf) contributes nothing, not NaN.
    terms_RV.masked_fill_(torch.isneginf(reference_RV), 0.0)
    return terms_RV.sum(-1)


def t_quantile_975(degrees: int) -> float:
    """97.5 % quantile of Student's t (exact for 1 and 2 degrees, within 0.3 % from 3 on)."""
    if degrees < 1:
        return math.inf
    if degrees == 1:
        return math.tan(math.pi * 0.475)
    if degrees == 2:
        p = 0.975
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z, v = Z_975, float(degrees)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


@dataclass(frozen=True)
class ClusterMean:
    """Token mean with a standard error clustered by rollout (inf with fewer than two rollouts)."""

    mean: float
    se: float
    clusters: int
    tokens: int

    @property
    def ci95(self) -> tuple[float, float]:
        """95 % confidence interval of the mean."""
        if not math.isfinite(self.se):
            return (-math.inf, math.inf)
        half = t_quantile_975(self.clusters - 1) * self.se
        return (self.mean - half, self.mean + half)


def cluster_mean(values_GR: Sequence[torch.Tensor]) -> ClusterMean:
    """Mean over all tokens of G rollouts of unequal length; rollouts without tokens are ignored."""
    kept = [values_R.detach().to(torch.float64) for values_R in values_GR if values_R.numel() > 0]
    if not kept:
        raise ValueError("no scored tokens: every rollout is empty")
    sums_G = torch.stack([values_R.sum() for values_R in kept])
    counts_G = torch.tensor([float(values_R.numel()) for values_R in kept], dtype=torch.float64)
    total = float(counts_G.sum())
    mean = float(sums_G.sum()) / total
    groups = len(kept)
    if groups < 2:
        return ClusterMean(mean, math.inf, groups, int(total))
    residuals_G = sums_G - mean * counts_G
    variance = groups / (groups - 1) * float((residuals_G**2).sum()) / total**2
    return ClusterMean(mean, math.sqrt(variance), groups, int(total))


def rise(log_rise: float) -> float:
    """exp(x) - 1: a difference in log-perplexity as a relative rise in perplexity."""
    return math.expm1(log_rise) if log_rise < 700 else math.inf


@dataclass(frozen=True)
class Divergence:
    """Candidate against reference over all probe tokens. Rises are relative: 0.03 is 3 %."""

    perplexity_rise: float
    """exp(mean KL) - 1 where KL is known, else exp(nll_rise) - 1; NaN if a score is not finite."""
    ci: tuple[float, float]
    """95 % interval of perplexity_rise, clustered by rollout."""
    estimator: str
    """"kl" or "nll": what perplexity_rise and ci come from."""
    nll_rise: float
    """Mean paired difference in NLL, nats per token."""
    nll_rise_se: float
    nll_perplexity_rise: float
    """exp(nll_rise) - 1."""
    kl: float | None
    """Mean full-vocabulary KL(reference || candidate), nats per token; None if unknown."""
    kl_se: float | None
    worst_sequence_rise: float
    """perplexity_rise of the single worst rollout."""
    worst_sequence: int
    """Its index in the input."""
    tokens: int
    sequences: int
    non_finite: int
    """Scores that are NaN or infinite, or KL clearly below zero; one makes the candidate unfit."""


def compare(
    candidate_GR: Sequence[torch.Tensor],
    reference_GR: Sequence[torch.Tensor],
    kl_GR: Sequence[torch.Tensor] | None = None,
) -> Divergence:
    """Compare per-token logprobs (and KL, if given) of the same tokens, one tensor a rollout.

    Args: lists of G tensors [R_g]; reference logprobs come from the full-precision policy of the
    same version. Raises ValueError when the lists do not pair up or hold no token at all.
    Non-finite scores do not raise: they are counted, and perplexity_rise becomes NaN.
    """
    _check_pairs(candidate_GR, reference_GR, "reference logprobs")
    if kl_GR is not None:
        _check_pairs(candidate_GR, kl_GR, "KL")
    deltas_GR = [
        ref_R.to(torch.float64) - cand_R.to(torch.float64)
        for cand_R, ref_R in zip(candidate_GR, reference_GR, strict=True)
    ]
    non_finite = sum(int((~torch.isfinite(delta_R)).sum()) for delta_R in deltas_GR)
    if kl_GR is not None:
        non_finite += sum(
            int((~torch.isfinite(kl_R) | (kl_R < -KL_ROUNDING)).sum()) for kl_R in kl_GR
        )
    nll = cluster_mean(deltas_GR)
    kl = cluster_mean(kl_GR) if kl_GR is not None else None
    deciding, per_sequence = (nll, deltas_GR) if kl is None else (kl, kl_GR or ())
    means = [float(values_R.mean()) if values_R.numel() else -math.inf for values_R in per_sequence]
    worst = max(range(len(means)), key=lambda index: (math.isnan(means[index]), means[index]))
    low, high = deciding.ci95
    broken = non_finite > 0
    return Divergence(
        perplexity_rise=math.nan if broken else rise(deciding.mean),
        ci=(math.nan, math.nan) if broken else (rise(low), rise(high)),
        estimator="nll" if kl is None else "kl",
        nll_rise=nll.mean,
        nll_rise_se=nll.se,
        nll_perplexity_rise=rise(nll.mean),
        kl=None if kl is None else kl.mean,
        kl_se=None if kl is None else kl.se,
        worst_sequence_rise=rise(means[worst]),
        worst_sequence=worst,
        tokens=nll.tokens,
        sequences=nll.clusters,
        non_finite=non_finite,
    )


def _check_pairs(
    candidate_GR: Sequence[torch.Tensor], other_GR: Sequence[torch.Tensor], what: str
) -> None:
    if len(candidate_GR) != len(other_GR):
        raise ValueError(f"{len(candidate_GR)} candidate rollouts but {len(other_GR)} of {what}")
    for index, (candidate_R, other_R) in enumerate(zip(candidate_GR, other_GR, strict=True)):
        if candidate_R.shape != other_R.shape or candidate_R.dim() != 1:
            raise ValueError(
                f"rollout {index}: candidate scores have shape {list(candidate_R.shape)}, "
                f"{what} {list(other_R.shape)}; expected the same [R]"
            )
