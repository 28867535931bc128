"""The watch over what serves: what only live traffic shows. Pure, no I/O and no clock.

    probation.serves(artifact_id, plan)       at every commit of a quantized artifact
    for each trained sequence:  probation.add(record)
    for judgement in probation.judge(): ...   one per plan and `episodes` sequences of it

Versions follow each other faster than their episodes are trained on: usually the next one is live
before the first episode of this one is scored by the trainer. What such episodes have in common is
the plan, so sequences are collected per plan; within a judgement every artifact is looked at by
itself too. A good judgement confirms the artifacts whose own sequences are good, once there are
``OWN_SHARE`` of `episodes` of them; ``patience`` bad ones in a row fail the plan, and with it the
artifacts whose own sequences are bad. One is enough if it is ``FLAGRANT`` times as bad as allowed:
chance does not explain that, and where one batch is one version, a second would judge the next.
A judgement is also bad if an artifact with that many sequences is, whatever its siblings show.

A judgement is bad if

    mismatch    sum(k3) / tokens, less what full precision shows at the same ages,
                is over max_mismatch_kl
    ess         sum(r)^2 / (tokens * sum(r^2)), over the same of full precision, is under min_ess
    left out    the share of the tokens that the loss's correction leaves out, less that of full
                precision, is over max_left_out: training starves though the rest agrees
    rejected    a sequence was sampled with log-probabilities that are not finite

Where only the trainer's are not finite, the sequence says nothing of what sampled it: it does not
count at all.

Sequences sampled in bf16 (a fallback, the other arm of an A/B test) are the control: they trail the
trainer by as many steps, so what they show is not quantization. Differences of independent causes
add in log space: KL is subtracted, and second moments of the ratios multiply, so ESS is divided.
Shares left out are subtracted. An age without ``CONTROL_EPISODES`` sequences of control counts as
if full precision agreed perfectly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_ptq.mismatch import SequenceMismatch

SCHEMA = 1
FULL = "bf16"
CONTROL_EPISODES = 8
"""Fewest sequences in full precision that say what an age alone does."""
OWN_SHARE = 0.25
"""Of `episodes`: fewest sequences of its own, since its last bad ones, that confirm an artifact."""
FLAGRANT = 4.0
"""Times that a number is beyond its limit so that it needs no second judgement."""
ARTIFACTS_KEPT = 200


@dataclass
class Sums:
    """Of sequences: how many, and the sums over their tokens."""

    episodes: float = 0.0
    tokens: float = 0.0
    k3: float = 0.0
    ratio: float = 0.0
    ratio_sq: float = 0.0
    left_out: float = 0.0
    """Tokens that a mask or the veto leaves out of the loss."""
    rejected: float = 0.0
    """Sequences that were sampled with log-probabilities that are not finite."""

    def add(self, other: Sums, weight: float = 1.0) -> None:
        """Add other's, times weight."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + weight * value)

    @property
    def mismatch(self) -> float:
        """k3 per token, nats; 0 without tokens."""
        return self.k3 / self.tokens if self.tokens else 0.0

    @property
    def share_left_out(self) -> float:
        """Of the tokens; 0 without tokens."""
        return self.left_out / self.tokens if self.tokens else 0.0

    @property
    def ess(self) -> float:
        """Effective sample size as a share of the tokens; 1 without tokens."""
        if not self.tokens:
            return 1.0
        return self.ratio**2 / (self.tokens * self.ratio_sq) if self.ratio_sq else 0.0


def sums_of(record: SequenceMismatch) -> Sums | None:
    """One sequence's; None where the trainer alone has no finite log-probabilities of it."""
    sums = (record.k3_sum, record.ratio_sum, record.ratio_sq_sum)
    finite = all(math.isfinite(value) for value in sums)
    if not record.sampled_finite:
        return Sums(1, record.tokens, *sums, rejected=1) if finite else Sums(1, rejected=1)
    counts = finite and not record.rejected
    return Sums(1, record.tokens, *sums, left_out=record.left_out) if counts else None


Ages = dict[int, Sums]


@dataclass(frozen=True)
class Judgement:
    """What `episodes` sequences of one plan say."""

    plan: str
    over: str
    """What is over its threshold, with the numbers; empty if all is well."""
    failed: bool
    """As often in a row as ``patience`` says."""
    numbers: Mapping[str, float]
    good: tuple[str, ...]
    """Artifacts whose own sequences are within the thresholds, and enough to confirm them."""
    bad: tuple[str, ...]


@dataclass
class _Window:
    artifacts: dict[str, Ages] = field(default_factory=dict)
    strikes: int = 0
    episodes: int = 0
    accused: list[str] = field(default_factory=list)
    """Artifacts that were bad in the judgements that count as strikes."""


class Probation:
    """See the module's docstring. cfg: config.ProbationConfig."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.plans: dict[str, str] = {}
        """Artifact id -> plan."""
        self._windows: dict[str, _Window] = {}
        self._control: Ages = {}
        self._own: dict[str, float] = {}
        """Artifact id -> sequences of its own in a row of judgements in which they were good."""

    def serves(self, artifact_id: str, plan: str) -> None:
        """A quantized artifact was committed."""
        self.plans[artifact_id] = plan
        for old in list(self.plans)[: max(0, len(self.plans) - ARTIFACTS_KEPT)]:
            del self.plans[old]
        self._own = {name: count for name, count in self._own.items() if name in self.plans}
        known = set(self.plans.values())
        self._windows = {p: window for p, window in self._windows.items() if p in known}

    def add(self, record: SequenceMismatch) -> None:
        """One trained sequence; of artifacts that nobody announced only full precision counts."""
        age, sums = max(0, record.age), sums_of(record)
        if sums is None:
            return
        if record.scheme == FULL:
            control = self._control.setdefault(age, Sums())
            control.add(sums)
            if control.episodes > 4 * self.cfg.episodes:  # the policy moves on: forget slowly
                control.add(control, -0.5)
            return
        plan = self.plans.get(record.artifact_id)
        if plan is None:
            return
        window = self._windows.setdefault(plan, _Window())
        window.artifacts.setdefault(record.artifact_id, {}).setdefault(age, Sums()).add(sums)
        window.episodes += 1

    def judge(self) -> list[Judgement]:
        """All judgements that are due; each starts the next window of its plan."""
        due = [p for p, w in self._windows.items() if w.episodes >= self.cfg.episodes]
        return [self._judge(plan) for plan in due]

    def forget(self, plan: str, artifacts: Iterable[str] = ()) -> None:
        """Start a plan's window and its strikes anew. What these artifacts sampled does not count
        any more: it is trained on for a while after they were taken back."""
        self._windows.pop(plan, None)
        for artifact_id in artifacts:
            self.plans.pop(artifact_id, None)
            self._own.pop(artifact_id, None)

    def _judge(self, plan: str) -> Judgement:
        window = self._windows[plan]
        every: Ages = {}
        good: list[str] = []
        bad: list[str] = []
        by_itself: list[str] = []
        flagrant = False
        for artifact_id, ages in window.artifacts.items():
            episodes = sum(sums.episodes for sums in ages.values())
            own_over, own_flagrant, _ = self._over(ages)
            if own_over:
                bad.append(artifact_id)
                self._own.pop(artifact_id, None)
                if episodes >= OWN_SHARE * self.cfg.episodes:
                    by_itself.append(f"{artifact_id} by itself: {own_over}")
                    flagrant |= own_flagrant
            elif self._enough(artifact_id, episodes):
                good.append(artifact_id)
            for age, sums in ages.items():
                every.setdefault(age, Sums()).add(sums)
        over, pooled_flagrant, numbers = self._over(every)
        over = over or "; ".join(by_itself)
        strikes = window.strikes + 1 if over else 0
        if flagrant or pooled_flagrant:
            strikes = max(strikes, self.cfg.patience)
        accused = list(dict.fromkeys([*window.accused, *bad])) if over else []
        failed = self.cfg.enabled and strikes >= self.cfg.patience
        self._windows[plan] = _Window(strikes=0 if failed else strikes, accused=accused)
        return Judgement(
            plan, over, failed, numbers | {"strikes": strikes}, tuple(good), tuple(accused)
        )

    def _enough(self, artifact_id: str, more: float) -> bool:
        """Whether an artifact has shown enough, with these good sequences more."""
        self._own[artifact_id] = self._own.get(artifact_id, 0) + more
        return self._own[artifact_id] >= OWN_SHARE * self.cfg.episodes

    def _over(self, ages: Ages) -> tuple[str, bool, dict[str, float]]:
        """(what is over its threshold, whether flagrantly, the numbers)."""
        total, control = Sums(), Sums()
        for age, sums in ages.items():
            total.add(sums)
            known = self._control.get(age)
            if known is not None and known.episodes >= CONTROL_EPISODES and known.tokens:
                control.add(known, sums.tokens / known.tokens)
            else:
                control.add(Sums(tokens=sums.tokens, ratio=sums.tokens, ratio_sq=sums.tokens))
        excess = total.mismatch - control.mismatch
        ess = min(1.0, total.ess / control.ess) if control.ess else 1.0
        left_out = total.share_left_out - control.share_left_out
        numbers = {
            "episodes": total.episodes,
            "tokens": total.tokens,
            "mismatch_k3": total.mismatch,
            "control_k3": control.mismatch,
            "ess": total.ess,
            "control_ess": control.ess,
            "left_out": total.share_left_out,
            "control_left_out": control.share_left_out,
        }
        over = []
        # Written so that NaN is over.
        if not excess <= self.cfg.max_mismatch_kl:
            over.append(
                f"mismatch {total.mismatch:.4g} nats per token, {control.mismatch:.4g} of it in "
                f"full precision too, limit {self.cfg.max_mismatch_kl:g}"
            )
        if not ess >= self.cfg.min_ess:
            over.append(
                f"effective sample size {total.ess:.2%} of the tokens, {control.ess:.2%} in full "
                f"precision, limit {self.cfg.min_ess:.0%}"
            )
        if not left_out <= self.cfg.max_left_out:
            over.append(
                f"{total.share_left_out:.2%} of the tokens left out of the loss, "
                f"{control.share_left_out:.2%} in full precision, limit {self.cfg.max_left_out:.0%}"
            )
        if total.rejected:
            over.append(f"{total.rejected:g} sequences sampled with log-probabilities not finite")
        flagrant = not excess <= FLAGRANT * self.cfg.max_mismatch_kl
        flagrant |= not ess >= self.cfg.min_ess / FLAGRANT
        flagrant |= not left_out <= FLAGRANT * self.cfg.max_left_out
        return "; ".join(over), flagrant, numbers

    def state(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {
            "schema": SCHEMA,
            "plans": dict(self.plans),
            "control": _plain(self._control),
            "own": dict(self._own),
            "windows": {
                plan: {
                    "artifacts": {name: _plain(ages) for name, ages in window.artifacts.items()},
                    "strikes": window.strikes,
                    "episodes": window.episodes,
                    "accused": list(window.accused),
                }
                for plan, window in self._windows.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``; ValueError for anything else."""
        try:
            if state["schema"] != SCHEMA:
                raise ValueError(f"probation: schema {state['schema']!r}, expected {SCHEMA}")
            self.plans = {str(name): str(plan) for name, plan in state["plans"].items()}
            self._control = _ages(state["control"])
            self._own = {str(name): float(count) for name, count in state["own"].items()}
            self._windows = {
                plan: _Window(
                    artifacts={name: _ages(ages) for name, ages in window["artifacts"].items()},
                    strikes=int(window["strikes"]),
                    episodes=int(window["episodes"]),
                    accused=[str(name) for name in window["accused"]],
                )
                for plan, window in state["windows"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"probation: not a stored state: {error!r}") from error


def _plain(ages: Ages) -> dict[str, dict[str, float]]:
    return {str(age): asdict(sums) for age, sums in ages.items()}


def _ages(record: Mapping[str, Any]) -> Ages:
    return {int(age): Sums(**sums) for age, sums in record.items()}
