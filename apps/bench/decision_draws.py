"""Probe sets drawn from a pool of scored rollouts, and what `compare` would say of each.

`compare` itself takes milliseconds and the simulation asks a million times, so the same numbers are
computed here from sums per rollout; a test holds both against each other.

Shape suffixes: G rollouts of the pool, T trials, N rollouts drawn, R tokens of a rollout, M of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from forge_ptq.numerics.clusters import ClusterMean
from forge_ptq.numerics.divergence import TAIL, Divergence, rise

METHODS = ("kl", "kl, symmetric", "kl, by token", "nll", "nll, by token")
"""What decides, the same without a correction for skewness, with tokens taken for independent, and
the first and last of these from the paired NLL."""


@dataclass
class Scored:
    """A candidate's scores of the pool."""

    name: str
    kl_GR: Sequence[torch.Tensor]
    delta_GR: Sequence[torch.Tensor]
    """Reference less candidate logprob, moved by a constant to the mean of the KL: over the pool
    the two differ by chance, and a simulation needs one truth."""
    nll_mean: float = math.nan
    """Of the pool, before it was moved, nats per token."""
    groups_G: Sequence[str] = ()
    """Of the prompts."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of decision_scores."""

    @classmethod
    def load(cls, path: Path) -> list[Scored]:
        """Of a file that `decision_scores` wrote."""
        data = torch.load(path)
        found = []
        for name, scores in data["candidates"].items():
            pairs = zip(data["reference"], scores["logprobs"], strict=True)
            delta_GR = [ref_R.double() - cand_R.double() for ref_R, cand_R in pairs]
            nll_mean = float(torch.cat(delta_GR).mean())
            moved = float(torch.cat(scores["kl"]).double().mean()) - nll_mean
            delta_GR = [delta_R + moved for delta_R in delta_GR]
            about = (data["groups"], data["settings"])
            found.append(cls(name, scores["kl"], delta_GR, nll_mean, *about))
        return found

    def values(self, estimator: str) -> Sequence[torch.Tensor]:
        """[R] per rollout: kl or nll."""
        return self.kl_GR if estimator == "kl" else self.delta_GR

    @cached_property
    def tokens(self) -> int:
        """Of the whole pool."""
        return sum(kl_R.numel() for kl_R in self.kl_GR)

    @cached_property
    def truth(self) -> float:
        """Relative rise over the whole pool."""
        total = sum(float(kl_R.sum(dtype=torch.float64)) for kl_R in self.kl_GR)
        return rise(total / self.tokens)

    def means(self) -> list[float]:
        """Mean KL of every rollout."""
        return [float(kl_R.mean()) for kl_R in self.kl_GR]


class Draws:
    """trials probe sets of up to `most` rollouts each, drawn with replacement."""

    def __init__(self, scored: Scored, trials: int, most: int, seed: int) -> None:
        self.scored, self.trials = scored, trials
        generator = torch.Generator().manual_seed(seed)
        self.picks_TN = torch.randint(len(scored.kl_GR), (trials, most), generator=generator)
        self._kept: dict[tuple[int, str], list[Divergence]] = {}

    def divergence(self, trial: int, size: int, method: str) -> Divergence:
        """Of the first `size` rollouts of a trial."""
        key = (size, method)
        if key not in self._kept:
            self._kept[key] = self._all(size, method)
        return self._kept[key][trial]

    def _all(self, size: int, method: str) -> list[Divergence]:
        estimator, clustered = method.partition(",")[0], "by token" not in method
        values = self.scored.values(estimator)
        counts_G = torch.tensor([v_R.numel() for v_R in values], dtype=torch.float64)
        sums_G = torch.stack([v_R.sum(dtype=torch.float64) for v_R in values])
        squares_G = torch.stack([(v_R.double() ** 2).sum() for v_R in values])
        kl_means_G = torch.tensor(self.scored.means(), dtype=torch.float64)
        picks_TN = self.picks_TN[:, :size]
        counts_TN, sums_TN = counts_G[picks_TN], sums_G[picks_TN]
        total_T = counts_TN.sum(1)
        mean_T = sums_TN.sum(1) / total_T
        if clustered:
            residuals_TN = sums_TN - mean_T[:, None] * counts_TN
            variance_T = size / (size - 1) * (residuals_TN**2).sum(1) / total_T**2
        else:
            spread_T = squares_G[picks_TN].sum(1) - total_T * mean_T**2
            variance_T = spread_T / (total_T - 1) / total_T
        skewness_T = torch.zeros_like(mean_T)
        if clustered and "symmetric" not in method:
            moments_T = (residuals_TN**2).mean(1)
            skewness_T = (residuals_TN**3).mean(1) / moments_T**1.5
        worst_T, where_T = kl_means_G[picks_TN].max(1)
        tails_T = self._tails(picks_TN, total_T)
        found = []
        for trial in range(self.trials):
            tokens, mean = int(total_T[trial]), float(mean_T[trial])
            clusters = size if clustered else tokens
            error = math.sqrt(float(variance_T[trial]))
            skewness = float(skewness_T[trial])
            log_rise = ClusterMean(mean, error, clusters, tokens, skewness)
            found.append(
                Divergence(
                    perplexity_rise=rise(mean),
                    log_rise=log_rise,
                    confidence=0.95,
                    estimator=estimator,
                    nll_rise=math.nan,
                    nll_rise_se=math.nan,
                    nll_perplexity_rise=math.nan,
                    kl=mean if estimator == "kl" else None,
                    kl_se=log_rise.se if estimator == "kl" else None,
                    token_kl=float(tails_T[trial]),
                    worst_sequence_rise=rise(float(worst_T[trial])),
                    worst_sequence=int(where_T[trial]),
                    tokens=tokens,
                    sequences=size,
                    non_finite=0,
                )
            )
        return found

    @cached_property
    def _sorted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """KL of all tokens of the pool, ascending, and the rollout of each."""
        kl_M = torch.cat(list(self.scored.kl_GR)).double()
        owners = [torch.full((kl_R.numel(),), g) for g, kl_R in enumerate(self.scored.kl_GR)]
        order_M = kl_M.argsort()
        return kl_M[order_M], torch.cat(owners)[order_M]

    def _tails(self, picks_TN: torch.Tensor, total_T: torch.Tensor) -> torch.Tensor:
        """99th percentile of the tokens' KL of every trial."""
        kl_M, owner_M = self._sorted
        tails = []
        for picks_N, total in zip(picks_TN, total_T, strict=True):
            times_G = torch.bincount(picks_N, minlength=len(self.scored.kl_GR))
            rank = max(1, math.ceil(TAIL * int(total)))
            reached_M = times_G[owner_M].cumsum(0)
            tails.append(kl_M[int(torch.searchsorted(reached_M, rank))])
        return torch.stack(tails)
