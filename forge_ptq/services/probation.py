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
    left out    masks and the veto of the loss leave out more than max_left_out of the tokens that
                they keep in full precision: training starves, however small the mismatch
    rejected    a sequence was sampled with log-probabilities that are not finite

Where only the trainer's are not finite, the sequence says nothing of what sampled it: it does not
count at all.

Sequences sampled in bf16 (a fallback, the other arm of an A/B test) are the control: they trail the
trainer by as many steps, so what they show is not quantization. Differences of independent causes
add in log space: KL is subtracted, and second moments of the ratios multiply, so ESS is divided.
Shares kept multiply too. An age without ``CONTROL_EPISODES`` sequences of control counts as if full
precision agreed perfectly. A veto drops whole sequences, which makes the share left out coarse:
only all artifacts together say whether it is over its limit and how far, and then each by itself
whether it is one of those. One that is over it by itself is not confirmed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forge_ptq.services.probation_sums import Ages, Sums, ages_of, plain, sums_of

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
        for ages in window.artifacts.values():
            for age, sums in ages.items():
                every.setdefault(age, Sums()).add(sums)
        pooled = self._evidence(every)
        over, flagrant = self._over(pooled, True)
        starved = self._starved(pooled)
        flagrant |= not _kept(pooled) >= (1 - self.cfg.max_left_out) / FLAGRANT
        good: list[str] = []
        bad: list[str] = []
        by_itself: list[str] = []
        for artifact_id, ages in window.artifacts.items():
            own = self._evidence(ages)
            own_over, own_flagrant = self._over(own, starved)
            if own_over:
                bad.append(artifact_id)
                self._own.pop(artifact_id, None)
                if own["episodes"] >= OWN_SHARE * self.cfg.episodes:
                    by_itself.append(f"{artifact_id} by itself: {own_over}")
                    flagrant |= own_flagrant
            elif not self._starved(own) and self._enough(artifact_id, own["episodes"]):
                good.append(artifact_id)
        over = over or "; ".join(by_itself)
        strikes = window.strikes + 1 if over else 0
        if flagrant:
            strikes = max(strikes, self.cfg.patience)
        accused = list(dict.fromkeys([*window.accused, *bad])) if over else []
        failed = self.cfg.enabled and strikes >= self.cfg.patience
        self._windows[plan] = _Window(strikes=0 if failed else strikes, accused=accused)
        return Judgement(
            plan, over, failed, pooled | {"strikes": strikes}, tuple(good), tuple(accused)
        )

    def _enough(self, artifact_id: str, more: float) -> bool:
        """Whether an artifact has shown enough, with these good sequences more."""
        self._own[artifact_id] = self._own.get(artifact_id, 0) + more
        return self._own[artifact_id] >= OWN_SHARE * self.cfg.episodes

    def _evidence(self, ages: Ages) -> dict[str, float]:
        """What these sequences say, and what full precision does at their ages."""
        total, control = Sums(), Sums()
        for age, sums in ages.items():
            total.add(sums)
            known = self._control.get(age)
            if known is not None and known.episodes >= CONTROL_EPISODES and known.tokens:
                control.add(known, sums.tokens / known.tokens)
            else:
                control.add(Sums(tokens=sums.tokens, ratio=sums.tokens, ratio_sq=sums.tokens))
        return {
            "episodes": total.episodes,
            "tokens": total.tokens,
            "mismatch_k3": total.mismatch,
            "control_k3": control.mismatch,
            "ess": total.ess,
            "control_ess": control.ess,
            "left_out": total.share_left_out,
            "control_left_out": control.share_left_out,
            "rejected": total.rejected,
        }

    def _starved(self, found: Mapping[str, float]) -> bool:
        """Whether the share of the tokens left out is over its limit."""
        return not _kept(found) >= 1 - self.cfg.max_left_out

    def _over(self, found: Mapping[str, float], shares: bool) -> tuple[str, bool]:
        """(what is over its threshold, whether mismatch or ess flagrantly). shares: of the tokens
        left out too."""
        cfg = self.cfg
        excess = found["mismatch_k3"] - found["control_k3"]
        ess = min(1.0, found["ess"] / found["control_ess"]) if found["control_ess"] else 1.0
        over = []
        # Written so that NaN is over.
        if not excess <= cfg.max_mismatch_kl:
            over.append(
                f"mismatch {found['mismatch_k3']:.4g} nats per token, {found['control_k3']:.4g} of "
                f"it in full precision too, limit {cfg.max_mismatch_kl:g}"
            )
        if not ess >= cfg.min_ess:
            over.append(
                f"effective sample size {found['ess']:.2%} of the tokens, "
                f"{found['control_ess']:.2%} in full precision, limit {cfg.min_ess:.0%}"
            )
        if shares and self._starved(found):
            over.append(
                f"{found['left_out']:.2%} of the tokens left out of the loss, "
                f"{found['control_left_out']:.2%} in full precision, limit {cfg.max_left_out:.0%} "
                "of what that keeps"
            )
        if found["rejected"]:
            over.append(
                f"{found['rejected']:g} sequences sampled with log-probabilities not finite"
            )
        flagrant = not excess <= FLAGRANT * cfg.max_mismatch_kl
        flagrant |= not ess >= cfg.min_ess / FLAGRANT
        return "; ".join(over), flagrant

    def state(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {
            "schema": SCHEMA,
            "plans": dict(self.plans),
            "control": plain(self._control),
            "own": dict(self._own),
            "windows": {
                plan: {
                    "artifacts": {name: plain(ages) for name, ages in window.artifacts.items()},
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
            self._control = ages_of(state["control"])
            self._own = {str(name): float(count) for name, count in state["own"].items()}
            self._windows = {
                plan: _Window(
                    artifacts={name: ages_of(ages) for name, ages in window["artifacts"].items()},
                    strikes=int(window["strikes"]),
                    episodes=int(window["episodes"]),
                    accused=[str(name) for name in window["accused"]],
                )
                for plan, window in state["windows"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"probation: not a stored state: {error!r}") from error


def _kept(found: Mapping[str, float]) -> float:
    """Share of the tokens that the loss keeps, of those that it keeps in full precision."""
    control = 1 - found["control_left_out"]
    return min(1.0, (1 - found["left_out"]) / control) if control > 0 else 1.0
