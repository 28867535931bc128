"""Does the quantized policy earn what the full-precision one does? A test on live prompts.

    test = ABTest(cfg.ptq.ab)
    for every prompt whose samples all say metadata["drawn"] and were never restarted:
        test.add(metadata["arm"], rewards of the samples)
    if test.verdict().failed: roll back                   # after every training step

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

Every look at growing data gives chance another try: looked at after each training step, a test at
5 % condemns a healthy plan in every fourth run. So there are few looks, and they share the error:

    block    prompts until the smaller arm has 8 * min_prompts; then everything starts from nothing,
             so a loss is found as fast after a thousand steps as after ten, and memory is bounded
    look     in a block where the smaller arm has 1, 2, 4 and 8 times min_prompts
    error    significance / BLOCKS for a block, of which each look has its share by size: a large
             loss is seen at an early look all the same, a small one only at a late look

By the union bound the chance to condemn a healthy plan is at most ``significance`` over BLOCKS
blocks in a row, which are 64 * min_prompts prompts per arm, and ``significance / BLOCKS`` for each
block beyond.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_ptq.config.guard import ABConfig
from forge_ptq.engine.admission import Arm

LOOKS = (1, 2, 4, 8)
"""Where a block is looked at: prompts of the smaller arm, in units of min_prompts."""
BLOCKS = 8
"""Blocks that share ``significance``."""


@dataclass(frozen=True)
class ABReport:
    """The comparison in the block so far. None where an arm has too few prompts to say."""

    agreement: float | None
    """1 + (q - f) / |f| of the mean rewards q (quantized) and f (full precision): q / f where they
    are positive; 0.95 is a loss of 5 % whatever the sign."""
    difference: float | None
    """q - f, mean rewards of the quantized and the full-precision arm."""
    p_value: float | None
    """One-sided: chance of a difference this low if the arms were equal. Needs two prompts each."""
    prompts_live: int
    prompts_companion: int
    limit: float | None
    """What p_value has to be under at this look; None where none was due."""
    failed: bool
    """A look was due, agreement < min_agreement, and p_value < limit."""


@dataclass
class Moments:
    """Count, mean and sum of squared deviations of values as they come (Welford)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Moments:
        """Of all of them."""
        made = cls()
        for value in values:
            made.add(value)
        return made

    def add(self, value: float) -> None:
        """One value more."""
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self.squares += delta * (value - self.mean)

    @property
    def error(self) -> float:
        """Squared standard error of the mean; needs two values."""
        return self.squares / (self.count - 1) / self.count


def _arms() -> dict[Arm, Moments]:
    return {"live": Moments(), "companion": Moments()}


@dataclass
class ABTest:
    """Collects rewards of one artifact plan; make a new one when the plan changes."""

    cfg: ABConfig
    _arms: dict[Arm, Moments] = field(default_factory=_arms)
    _looks: int = 0
    """Entries of LOOKS that this block has reached."""

    def add(self, arm: Arm, rewards: Sequence[float]) -> None:
        """The rewards of all samples of one prompt.

        ValueError for another arm, no reward, or one that is not finite.
        """
        if arm not in self._arms:
            raise ValueError(f"arm is {arm!r}, expected live or companion")
        if not rewards or not all(math.isfinite(reward) for reward in rewards):
            raise ValueError(f"rewards are {list(rewards)!r}, expected finite numbers")
        self._arms[arm].add(math.fsum(rewards) / len(rewards))

    def verdict(self) -> ABReport:
        """What the rewards say now. After a block's last look the next block begins."""
        live, companion = self._arms["live"], self._arms["companion"]
        agreement = difference = p = None
        if live.count and companion.count:
            agreement = _agreement(live.mean, companion.mean)
            difference = live.mean - companion.mean
            p = welch_less(live, companion)
        limit = self._due(min(live.count, companion.count))
        low = agreement is not None and agreement < self.cfg.min_agreement
        failed = low and limit is not None and p is not None and p < limit
        if self._looks == len(LOOKS):
            self._arms, self._looks = _arms(), 0
        return ABReport(agreement, difference, p, live.count, companion.count, limit, failed)

    def _due(self, prompts: int) -> float | None:
        """The error that a look now may take: the shares of all looks that came due since the last
        one; None if none did. prompts: of the smaller arm."""
        reached = sum(size * self.cfg.min_prompts <= prompts for size in LOOKS)
        due = LOOKS[self._looks : reached]
        self._looks = reached
        return self.cfg.significance / BLOCKS * sum(due) / sum(LOOKS) if due else None

    def state(self) -> dict[str, Any]:
        """JSON for ``restore``."""
        arms = {arm: [m.count, m.mean, m.squares] for arm, m in self._arms.items()}
        return {"arms": arms, "looks": self._looks}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._arms = {arm: Moments(*state["arms"][arm]) for arm in _arms()}
        self._looks = int(state["looks"])


def _agreement(q: float, f: float) -> float:
    if q == f:
        return 1.0
    if f == 0:
        return math.copysign(math.inf, q)
    return 1 + (q - f) / abs(f)


def welch_less(sample: Moments, other: Moments) -> float | None:
    """One-sided p of Welch's t test against "the mean of ``sample`` is lower than of ``other``".

    None with fewer than two values in either. Without any spread the means are all there is: 0.0,
    0.5 or 1.0.
    """
    if min(sample.count, other.count) < 2:
        return None
    difference, square = sample.mean - other.mean, sample.error + other.error
    if square == 0:
        return 0.5 if difference == 0 else float(difference > 0)
    # Of shares, not of squares themselves: those of tiny spreads would underflow.
    a, b = sample.error / square, other.error / square
    df = 1 / (a * a / (sample.count - 1) + b * b / (other.count - 1))
    return student_cdf(difference / math.sqrt(square), df)


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
