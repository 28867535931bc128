"""Does the quantized policy earn what the full-precision one does? A test on live prompts.

    test = ABTest(cfg.ptq.ab)
    for every finished episode whose completion says metadata["drawn"]:
        test.add(group, metadata["arm"], reward)      # group: one call of generate
    if test.verdict().failed: roll back

The unit is the prompt, not the episode: the samples of one prompt share its difficulty, so they are
not independent, and counting each would make any difference look certain. A prompt's reward is the
mean over its samples; each arm is the mean over its prompts. Prompts are drawn for the arms by lot,
so they differ in nothing else, and the difference is tested with Welch's t (arms of unequal size
and spread), one-sided: is the quantized arm worse?

    t  = (q - f) / sqrt(s_q^2 / n_q + s_f^2 / n_f)
    df = (s_q^2 / n_q + s_f^2 / n_f)^2
         / ((s_q^2 / n_q)^2 / (n_q - 1) + (s_f^2 / n_f)^2 / (n_f - 1))      Welch-Satterthwaite
    p  = P(T_df <= t)

Rewards are often 0 or 1; means of some 32 prompts are near enough to normal for that. A failure
needs both: agreement under the threshold, since a certain but tiny loss is no reason to go back,
and significance, since a large one may be chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from forge_ptq.config.guard import ABConfig
from forge_ptq.engine.admission import Arm


@dataclass(frozen=True)
class ABReport:
    """The comparison so far. None where an arm has too few prompts to say."""

    agreement: float | None
    """1 + (q - f) / |f| of the mean rewards q (quantized) and f (full precision): q / f where they
    are positive; 0.95 is a loss of 5 % whatever the sign."""
    difference: float | None
    """q - f, mean rewards of the quantized and the full-precision arm."""
    p_value: float | None
    """One-sided: chance of a difference this low if the arms were equal. Needs two prompts each."""
    prompts_live: int
    prompts_companion: int
    failed: bool
    """Both arms have min_prompts, agreement < min_agreement, and p_value < significance."""


@dataclass
class _Group:
    arm: Arm
    total: float = 0.0
    count: int = 0
    mixed: bool = False


@dataclass
class ABTest:
    """Collects rewards of one artifact plan; make a new one when the plan changes."""

    cfg: ABConfig
    _groups: dict[str, _Group] = field(default_factory=dict)

    def add(self, group: str, arm: Arm, reward: float) -> None:
        """One episode's reward. group: unique for each call of ``generate``.

        A group seen in both arms counts in neither: some of its samples were restarted on the other
        slot, and those were the long ones. ValueError for another arm or a reward that is not
        finite.
        """
        if arm not in ("live", "companion"):
            raise ValueError(f"arm is {arm!r}, expected live or companion")
        if not math.isfinite(reward):
            raise ValueError(f"reward of group {group!r} is {reward!r}, expected a finite number")
        entry = self._groups.setdefault(group, _Group(arm))
        entry.mixed |= entry.arm != arm
        entry.total += reward
        entry.count += 1

    def verdict(self) -> ABReport:
        """What the rewards say now."""
        live, companion = self._means("live"), self._means("companion")
        n_live, n_companion = len(live), len(companion)
        if not live or not companion:
            return ABReport(None, None, None, n_live, n_companion, failed=False)
        q, f = math.fsum(live) / n_live, math.fsum(companion) / n_companion
        p = welch_less(live, companion)
        agreement = _agreement(q, f)
        enough = min(n_live, n_companion) >= self.cfg.min_prompts
        low = agreement < self.cfg.min_agreement
        failed = enough and low and p is not None and p < self.cfg.significance
        return ABReport(agreement, q - f, p, n_live, n_companion, failed)

    def state(self) -> list[list[Any]]:
        """JSON for ``restore``: [group, arm, sum, count, mixed] of every group."""
        return [[n, g.arm, g.total, g.count, g.mixed] for n, g in self._groups.items()]

    def restore(self, state: list[list[Any]]) -> None:
        """Go on from a state."""
        self._groups = {str(name): _Group(*rest) for name, *rest in state}

    def _means(self, arm: Arm) -> list[float]:
        groups = self._groups.values()
        return [g.total / g.count for g in groups if g.arm == arm and not g.mixed]


def _agreement(q: float, f: float) -> float:
    if q == f:
        return 1.0
    if f == 0:
        return math.copysign(math.inf, q)
    return 1 + (q - f) / abs(f)


def welch_less(sample: list[float], other: list[float]) -> float | None:
    """One-sided p of Welch's t test against "the mean of ``sample`` is lower than of ``other``".

    None with fewer than two values in either. Without any spread the means are all there is: 0.0,
    0.5 or 1.0.
    """
    if min(len(sample), len(other)) < 2:
        return None
    mean_a, share_a = _mean_and_error(sample)
    mean_b, share_b = _mean_and_error(other)
    difference, square = mean_a - mean_b, share_a + share_b
    if square == 0:
        return 0.5 if difference == 0 else float(difference > 0)
    # Of shares, not of squares themselves: those of tiny spreads would underflow.
    a, b = share_a / square, share_b / square
    df = 1 / (a * a / (len(sample) - 1) + b * b / (len(other) - 1))
    return student_cdf(difference / math.sqrt(square), df)


def _mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean, and squared standard error of it."""
    n = len(values)
    mean = math.fsum(values) / n
    return mean, math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n


def student_cdf(t: float, df: float) -> float:
    """P(T <= t) of Student's t with df > 0 degrees of freedom, not necessarily whole.

    P(|T| > |t|) = I_x(df / 2, 1 / 2) with x = df / (df + t^2) (DLMF 8.17, Abramowitz and Stegun
    26.7.1).
    """
    tail = incomplete_beta(df / 2, 0.5, df / (df + t * t)) / 2
    return tail if t < 0 else 1 - tail


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function I_x(a, b), a, b > 0 and x in [0, 1].

    By its continued fraction (DLMF 8.17.22) with Lentz's method, which converges fast for
    x < (a + 1) / (a + b + 2); beyond, I_x(a, b) = 1 - I_{1-x}(b, a).
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)
    log_front = a * math.log(x) + b * math.log1p(-x)
    log_front += math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    tiny = 1e-300
    fraction, c, d = 1.0, 1.0, 0.0
    for i in range(1000):
        m = i // 2
        if i == 0:
            step = 1.0
        elif i % 2 == 0:
            step = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            step = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / (1 + step * d or tiny)
        c = 1 + step / c or tiny
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return math.exp(log_front) * (fraction - 1) / a
