"""How far a candidate is from the full-precision policy, from per-token scores of rollouts.

The target is the rise in log-perplexity of the full-precision policy ``ref`` when ``cand`` stands
in for it: the expected ``log ref - log cand`` of a token, nats. Given a context, the expectation
over ref's next token is ``KL(ref || cand)`` over the whole vocabulary. Three estimates:

- ``kl``: mean KL. The token is integrated out, exactly, so it does not matter which policy mu
  sampled it. What is left of mu is which contexts are looked at: the error is at most
  ``max KL * TV(mu, ref)`` over contexts, of second order in how far mu is from ref, and for a mu
  that has been served lately these are the contexts that the candidate will meet. So this decides
  wherever it is known. Its variance is about 30 times smaller than that of the paired NLL.
- ``k3``: mean of ``w * (r - 1 - log r)`` with ``r = cand / ref`` of the sampled token and
  ``w = ref / mu`` its importance weight (Schulman, "Approximating KL divergence", 2020). ``r - 1``
  has mean zero under ref and takes most of the variance away; no term is negative. Needs logprobs
  alone, and decides where KL is unknown. Without mu's logprobs w is 1 ("k3, unweighted"): near ref
  it is then still ``(log r)^2 / 2``, whose mean hardly depends on who sampled.
- ``nll``: mean of ``log ref - log cand``, the plain paired NLL. Reported, never decides: on tokens
  that mu sampled its mean is ``KL(mu || cand) - KL(mu || ref)``, so with mu close to the candidate
  (an artifact of the version before, say) a harmful candidate looks harmless or better than ref.

Where mu's logprobs are known ``context_ess`` says how far mu's contexts are from ref's own: the
effective sample size of the weights that would make ref's of them, the product of ref / mu over the
tokens before, truncated at ``PREFIX_CAP``. Nothing is reweighted by it: the product's variance
grows with the length, and mu's contexts are the ones that matter.

Errors are clustered (clusters.py) by rollout, or by prompt where that is told.

Shape suffixes: G rollouts (clusters), R scored tokens of one rollout, M of all, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from forge_ptq.numerics.clusters import ClusterMean, cluster_mean

KL_ROUNDING = 1e-3
"""KL below minus this is an error; above it, zero as fp32 sums over a vocabulary see it."""
PREFIX_CAP = 10.0
"""Largest weight of a context."""
TOKEN_CAP = 10.0
"""Largest weight of a token."""
TAIL = 0.99
"""Quantile of the tokens' KL that is watched."""


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


def rise(log_rise: float) -> float:
    """exp(x) - 1: a difference in log-perplexity as a relative rise in perplexity."""
    return math.expm1(log_rise) if log_rise < 700 else math.inf


@dataclass(frozen=True)
class Divergence:
    """Candidate against reference over all probe tokens. Rises are relative: 0.03 is 3 %."""

    perplexity_rise: float
    """exp(log_rise.mean) - 1; NaN if a score is not finite."""
    log_rise: ClusterMean
    """Rise in log-perplexity by the estimator, nats per token."""
    confidence: float
    """Level of ci."""
    estimator: str
    """"kl", "k3" or "k3, unweighted": what perplexity_rise and ci come from."""
    nll_rise: float
    """Mean paired difference in NLL, nats per token."""
    nll_rise_se: float
    nll_perplexity_rise: float
    """exp(nll_rise) - 1."""
    kl: float | None
    """Mean full-vocabulary KL(reference || candidate), nats per token; None if unknown."""
    kl_se: float | None
    token_kl: float | None
    """99th percentile of the tokens' KL, nats; None if unknown."""
    worst_sequence_rise: float
    """perplexity_rise of the single worst rollout."""
    worst_sequence: int
    """Its index in the input."""
    tokens: int
    sequences: int
    non_finite: int
    """Scores that are NaN or infinite, or KL clearly below zero; one makes the candidate unfit."""
    context_ess: float | None = None
    """Effective sample size of the reference's contexts, share of the tokens; None if mu is
    unknown."""

    @property
    def ci(self) -> tuple[float, float]:
        """Interval of perplexity_rise, clustered."""
        return self.interval(self.confidence)

    def interval(self, confidence: float) -> tuple[float, float]:
        """The same at another level; NaN if a score is not finite."""
        if self.non_finite:
            return (math.nan, math.nan)
        low, high = self.log_rise.interval(confidence)
        return (rise(low), rise(high))


def compare(
    candidate_GR: Sequence[torch.Tensor],
    reference_GR: Sequence[torch.Tensor],
    kl_GR: Sequence[torch.Tensor] | None = None,
    *,
    behaviour_GR: Sequence[torch.Tensor | None] | None = None,
    clusters_G: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
) -> Divergence:
    """Compare per-token logprobs (and KL, if given) of the same tokens, one tensor a rollout.

    Args: lists of G tensors [R_g]; reference logprobs come from the full-precision policy of the
    same version, behaviour ones from the policy that sampled (None where it is unknown: that
    rollout's weights are then 1). clusters_G: a label per rollout, equal for those of one prompt;
    None: every rollout is a cluster. See the module's docstring for what is made of them.
    Raises ValueError when the lists do not pair up or hold no token at all, or a behaviour logprob
    is not finite: that is no property of the candidate.
    Non-finite scores do not raise: they are counted, and perplexity_rise becomes NaN.
    """
    _check_pairs(candidate_GR, reference_GR, "reference logprobs")
    if kl_GR is not None:
        _check_pairs(candidate_GR, kl_GR, "KL")
    deltas_GR = [
        ref_R.to(torch.float64) - cand_R.to(torch.float64)
        for cand_R, ref_R in zip(candidate_GR, reference_GR, strict=True)
    ]
    ratios_GR = _log_ratios(reference_GR, behaviour_GR)
    non_finite = sum(int((~torch.isfinite(delta_R)).sum()) for delta_R in deltas_GR)
    if kl_GR is not None:
        non_finite += sum(
            int((~torch.isfinite(kl_R) | (kl_R < -KL_ROUNDING)).sum()) for kl_R in kl_GR
        )
    nll = cluster_mean(deltas_GR, clusters_G)
    kl = None if kl_GR is None else cluster_mean(kl_GR, clusters_G)
    if kl_GR is not None and kl is not None:
        deciding, per_sequence, estimator = kl, list(kl_GR), "kl"
    else:
        per_sequence = _k3(deltas_GR, ratios_GR)
        deciding = cluster_mean(per_sequence, clusters_G)
        estimator = "k3, unweighted" if ratios_GR is None else "k3"
    means = [float(values_R.mean()) if values_R.numel() else -math.inf for values_R in per_sequence]
    worst = max(range(len(means)), key=lambda index: (math.isnan(means[index]), means[index]))
    return Divergence(
        perplexity_rise=math.nan if non_finite else rise(deciding.mean),
        log_rise=deciding,
        confidence=confidence,
        estimator=estimator,
        nll_rise=nll.mean,
        nll_rise_se=nll.se,
        nll_perplexity_rise=rise(nll.mean),
        kl=None if kl is None else kl.mean,
        kl_se=None if kl is None else kl.se,
        token_kl=None if kl_GR is None else _quantile(torch.cat(list(kl_GR)), TAIL),
        worst_sequence_rise=rise(means[worst]),
        worst_sequence=worst,
        tokens=nll.tokens,
        sequences=sum(delta_R.numel() > 0 for delta_R in deltas_GR),
        non_finite=non_finite,
        context_ess=None if ratios_GR is None else _context_ess(ratios_GR),
    )


def _quantile(values_M: torch.Tensor, share: float) -> float:
    """Smallest value that at least this share of the values does not exceed."""
    rank = max(1, math.ceil(share * values_M.numel()))
    return float(values_M.to(torch.float64).kthvalue(rank).values)


def _log_ratios(
    reference_GR: Sequence[torch.Tensor], behaviour_GR: Sequence[torch.Tensor | None] | None
) -> list[torch.Tensor] | None:
    """log(ref / mu) of every token, fp64; None if mu is known of no rollout."""
    if behaviour_GR is None or all(mu_R is None for mu_R in behaviour_GR):
        return None
    known = [
        ref_R if mu_R is None else mu_R
        for ref_R, mu_R in zip(reference_GR, behaviour_GR, strict=True)
    ]
    _check_pairs(reference_GR, known, "behaviour logprobs")
    for index, mu_R in enumerate(behaviour_GR):
        if mu_R is not None and not bool(torch.isfinite(mu_R).all()):
            raise ValueError(f"rollout {index}: a behaviour logprob is NaN or infinite")
    return [
        ref_R.to(torch.float64) - mu_R.to(torch.float64)
        for ref_R, mu_R in zip(reference_GR, known, strict=True)
    ]


def _k3(
    deltas_GR: Sequence[torch.Tensor], ratios_GR: Sequence[torch.Tensor] | None
) -> list[torch.Tensor]:
    """w * (r - 1 - log r) of every token."""
    terms_GR = [torch.expm1(-delta_R) + delta_R for delta_R in deltas_GR]
    if ratios_GR is None:
        return terms_GR
    return [
        ratio_R.exp().clamp(max=TOKEN_CAP) * term_R
        for ratio_R, term_R in zip(ratios_GR, terms_GR, strict=True)
    ]


def _context_ess(ratios_GR: Sequence[torch.Tensor]) -> float:
    """Effective share of the tokens, were their contexts weighted as the reference meets them."""
    # A token's context is what came before it: its own ratio does not count.
    before_M = torch.cat([ratio_R.cumsum(0) - ratio_R for ratio_R in ratios_GR])
    weight_M = before_M.clamp(max=math.log(PREFIX_CAP)).exp()
    return float(weight_M.sum()) ** 2 / (float((weight_M**2).sum()) * weight_M.numel())


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
