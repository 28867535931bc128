"""How the statistics of many shares become one, whoever is missing and whoever has gone mad.

A share is the part of a round's batches that one replica worked on. Merging is two pure steps, and
both work on a row slice of the table (some of the sites), so that every merger rank needs its slice
only:

1. ``judge`` looks at each share's absmax per site. A share that saw a non-finite element is left
   out. So is one whose log2 absmax of some site lies more than ``sigma_clip`` robust standard
   deviations from the median of all shares. Judgements of slices combine with ``worst``: a share
   must be left out of all sites or of none.
2. ``reduce`` merges the shares that remain. Counts, histograms and sums always add. What becomes of
   absmax per channel is the *rule*: ``histogram`` and ``max`` take the maximum over shares, exactly
   what one process would have seen; ``weighted_mean`` weights by tokens and ``median`` takes the
   middle one (the mean of two), which ignore a lone extreme.

   ``histogram`` and ``max`` differ in intent: under ``histogram`` a range is read off the merged
   histogram, up to the merged absmax; ``max`` is for the absmax range and promises nothing else.

Robust: the median and 1.4826 MAD (which is sigma for a normal sample) do not move when fewer than
half of the shares are arbitrary, where a mean and a standard deviation are what the outlier makes
them. MAD of near-identical shares is near zero and would condemn everybody else over nothing; it
has a floor of ``SIGMA_FLOOR`` octaves. Honest shares agree within an octave nearly everywhere, but
where activations are massive one can see ten times what the others saw, and that is exactly the
range that must not get lost: a sigma_clip of 25 times the floor tolerates a factor of 76.

The result does not depend on the order in which shares arrived: they are sorted by id before any
floating-point sum.

Shape suffixes: S shares, L sites, C channels, B bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from forge_ptq.numerics.stats import ActivationStats, merge_all

RULES = ("histogram", "max", "weighted_mean", "median")

SIGMA_FLOOR = 0.25
"""Smallest robust sigma of log2 absmax, in octaves."""

MAD_TO_SIGMA = 1.4826

MIN_JUDGED = 3
"""With fewer shares than this, no majority could say who is the outlier."""

Shares = Mapping[str, Mapping[str, ActivationStats]]
"""{share id: {site: statistics}}"""


@dataclass(frozen=True)
class Judgement:
    """What speaks against one share, from the sites that somebody looked at."""

    deviation: float = 0.0
    """Largest distance from the median of log2 absmax, in robust sigmas."""

    site: str = ""
    """Where that was."""

    non_finite: int = 0
    """Elements that were NaN or infinite."""

    non_finite_site: str = ""
    """The first site with one."""

    def reason(self, sigma_clip: float) -> str | None:
        """Why the share is left out, or None if it is not. sigma_clip 0 forgives deviations."""
        if self.non_finite:
            return f"{self.non_finite} non-finite activations, first in {self.non_finite_site}"
        if sigma_clip and self.deviation > sigma_clip:
            return (
                f"absmax of {self.site} is {self.deviation:.1f} robust sigmas from the median "
                f"(limit {sigma_clip:g})"
            )
        return None


def judge(shares: Shares) -> dict[str, Judgement]:
    """What speaks against each share on the sites given.

    A site of a share that saw no token or a non-finite element has no vote on that site, so that
    judging slices and combining them gives what judging everything at once gives.
    ValueError if the shares differ in sites.
    """
    sites = _common_sites(shares)
    result = {share: _unclean(shares[share]) for share in sorted(shares)}
    for site in sites:
        of_site = {share: shares[share][site] for share in result}
        voters = [s for s, stat in of_site.items() if stat.tokens and not stat.non_finite]
        if len(voters) < MIN_JUDGED:
            continue
        log_S = torch.tensor(
            [math.log2(max(of_site[share].absmax, 1e-30)) for share in voters],
            dtype=torch.float64,
        )
        away_S = (log_S - log_S.quantile(0.5)).abs()
        sigma = max(MAD_TO_SIGMA * float(away_S.quantile(0.5)), SIGMA_FLOOR)
        for share, away in zip(voters, (away_S / sigma).tolist(), strict=True):
            result[share] = worst([result[share], Judgement(deviation=away, site=site)])
    return result


def worst(judgements: Iterable[Judgement]) -> Judgement:
    """One share's judgements on several slices as one; in any order (ties go to the first name)."""
    found = list(judgements)
    far = min(found, key=lambda j: (-j.deviation, j.site), default=Judgement())
    bad = [j for j in found if j.non_finite]
    return Judgement(
        deviation=far.deviation,
        site=far.site,
        non_finite=sum(j.non_finite for j in bad),
        non_finite_site=min((j.non_finite_site for j in bad), default=""),
    )


def reduce(shares: Shares, rule: str = "histogram") -> dict[str, ActivationStats]:
    """The shares' statistics as one, site by site; those to leave out must be gone already.

    ValueError for an unknown rule, for no share at all, or if the shares differ in sites.
    """
    if rule not in RULES:
        raise ValueError(f"merge rule {rule!r}; expected one of {', '.join(RULES)}")
    if not shares:
        raise ValueError("there is no share to merge")
    sites = _common_sites(shares)
    return {site: _one([shares[share][site] for share in sorted(shares)], rule) for site in sites}


def _one(parts: list[ActivationStats], rule: str) -> ActivationStats:
    total = merge_all(parts, parts[0].channels)
    seen = [part for part in parts if part.tokens]
    combine = _RANGE_RULES.get(rule)
    if combine is not None and seen:
        total.absmax_C = combine(
            torch.stack([part.absmax_C for part in seen]),
            torch.tensor([part.tokens for part in seen], dtype=torch.float64),
        ).to(torch.float32)
    return total


def _weighted_mean(absmax_SC: torch.Tensor, tokens_S: torch.Tensor) -> torch.Tensor:
    return (absmax_SC.to(torch.float64) * (tokens_S / tokens_S.sum())[:, None]).sum(0)


def _median(absmax_SC: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    ordered_SC = absmax_SC.to(torch.float64).sort(dim=0).values
    middle = len(ordered_SC) // 2
    return (ordered_SC[middle] + ordered_SC[-1 - middle]) / 2


_RANGE_RULES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "weighted_mean": _weighted_mean,
    "median": _median,
}


def _common_sites(shares: Shares) -> list[str]:
    """Names of the sites, in the order of the first share (which all others must match)."""
    first: list[str] = []
    for share in sorted(shares):
        names = list(shares[share])
        first = first or names
        if names != first:
            odd = sorted(set(names) ^ set(first))
            where = odd[0] if odd else "the order"
            raise ValueError(f"share {share} differs from the others in its sites: {where}")
    return first


def _unclean(sites: Mapping[str, ActivationStats]) -> Judgement:
    bad = {site: stat.non_finite for site, stat in sites.items() if stat.non_finite}
    return Judgement(non_finite=sum(bad.values()), non_finite_site=min(bad, default=""))
