"""What follows a refusal, and what is remembered of it between publishes. Pure: no I/O, no actors,
no clock. The states that a version goes through meanwhile are in passage.py.

Demotions are a stack of steps, each {layer: better scheme}; what they come to together lies over
whatever plan is live, wherever it still is an upgrade.

    refused, or probation failed     one step more; good publishes in a row start again from 0
    recover_after good publishes     the latest step is taken back, on trial
    a failure while on trial         the same step again, and the next time it is taken back only
                                     after twice as many good publishes
    as many good publishes again     the trial is over

A publish is good if its first candidate passed. One that failed for another reason than its quality
counts neither way. A failed probation *owes* a step: it is taken where layers can be ranked, at the
next publish. Where ``on_reject`` has no demote, a failed probation's step is the whole model in
bf16, taken back like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forge_ptq.services.passage import State

SCHEMA = 1
BETTER: Mapping[str, int] = {"int8_static": 0, "int8_dynamic": 1, "bf16": 2}
"""Order of the schemes."""
BANNED_KEPT = 1000
LONGEST = 2**16
"""Most good publishes that taking a step back is made to wait for."""


def next_rung(on_reject: Sequence[str], demotions: int, attempts: int) -> State:
    """What follows a refusal, given the demotions made for this version and how many may be."""
    if "demote" in on_reject and demotions < attempts:
        return State.DEMOTE
    return State.BF16 if "bf16" in on_reject else State.KEEP


@dataclass(frozen=True)
class Move:
    """One fused group to its next better scheme."""

    layers: tuple[str, ...]
    old: str
    new: str
    flops: float
    """Share of the model's linear FLOPs."""


def pick(moves: Iterable[Move], share: float) -> dict[str, str]:
    """The demotion: first moves of the ranking, one per group, until they hold this share of the
    linear FLOPs (at least one; all there are if that is less). Empty if there is nothing better."""
    chosen: dict[str, str] = {}
    moved = 0.0
    for move in moves:
        if moved >= share * (1 - 1e-9):
            break
        if any(layer in chosen for layer in move.layers):
            continue
        chosen.update(dict.fromkeys(move.layers, move.new))
        moved += move.flops
    return chosen


def overlaid(planned: Mapping[str, str], overlay: Mapping[str, str]) -> dict[str, str]:
    """The planned schemes, each layer with the overlay's where that is better."""
    return {
        name: overlay[name] if BETTER[overlay.get(name, scheme)] > BETTER[scheme] else scheme
        for name, scheme in planned.items()
    }


@dataclass(frozen=True)
class Step:
    """One demotion. layers: {layer: scheme}; whole: every layer in bf16."""

    layers: Mapping[str, str] = field(default_factory=dict)
    whole: bool = False
    failures: int = 0
    """How often it was taken back in vain."""

    def improves(self, schemes: Mapping[str, str]) -> bool:
        """Whether it makes anything better than these schemes of the layers."""
        if self.whole:
            return any(scheme != "bf16" for scheme in schemes.values())
        return overlaid(schemes, self.layers) != dict(schemes)


class Ladder:
    """What is remembered between publishes. See the module's docstring.

    recover_after: good publishes before a step is taken back.
    """

    def __init__(self, recover_after: int) -> None:
        self.recover_after = recover_after
        self.steps: list[Step] = []
        self.streak = 0
        """Good publishes in a row since the last failure or promotion."""
        self.trial: Step | None = None
        """The step taken back last, until it has proved unnecessary."""
        self.owed = 0
        """Steps that failed probations have asked for and that are not taken yet."""
        self.banned: dict[str, int] = {}
        """Artifact id -> version, of what was rolled back: never served again."""
        self.condemned: list[str] = []
        """Plans found guilty in this process, in order; a candidate made before is not served."""

    @property
    def overlay(self) -> dict[str, str]:
        """What all steps come to, {layer: scheme}."""
        merged: dict[str, str] = {}
        for step in self.steps:
            for name, scheme in step.layers.items():
                if name not in merged or BETTER[scheme] > BETTER[merged[name]]:
                    merged[name] = scheme
        return merged

    @property
    def whole(self) -> bool:
        """Whether some step puts the whole model into bf16."""
        return any(step.whole for step in self.steps)

    @property
    def level(self) -> int:
        """Steps down from the plan."""
        return len(self.steps)

    def needed(self, step: Step) -> int:
        """Good publishes in a row before this step may be taken back, or its trial is over."""
        return min(self.recover_after * 2**step.failures, max(LONGEST, self.recover_after))

    def begin(self) -> Step | None:
        """At the start of a publish: the step that is now taken back, on trial; None if none is.

        One at a time: while one is on trial, and while one is owed, the others stay.
        """
        if self.trial is not None or self.owed or not self.steps:
            return None
        if self.streak < self.needed(self.steps[-1]):
            return None
        self.trial = self.steps.pop()
        self.streak = 0
        return self.trial

    def passed(self) -> None:
        """A good publish."""
        self.streak += 1
        if self.trial is not None and self.streak >= self.needed(self.trial):
            self.trial = None

    def failed(self) -> None:
        """A candidate was refused."""
        self.streak = 0

    def again(self, schemes: Mapping[str, str] | None = None) -> Step | None:
        """The step on trial, which is to be taken again with a longer wait, if it improves the
        schemes of the candidate that failed (None: not known); the trial is over either way."""
        step, self.trial = self.trial, None
        if step is None or (schemes is not None and not step.improves(schemes)):
            return None
        return replace(step, failures=step.failures + 1)

    def push(self, step: Step) -> None:
        """Take a step; it pays for one that is owed."""
        self.steps.append(step)
        self.streak = 0
        self.owed = max(0, self.owed - 1)

    def condemn(self, plan: str, artifacts: Mapping[str, int]) -> None:
        """A probation failed: {artifact id: version} are never served again, one step is owed."""
        self.ban(artifacts)
        self.condemned.append(plan)
        self.streak = 0
        self.owed += 1

    def ban(self, artifacts: Mapping[str, int]) -> None:
        """{artifact id: version} that are never to serve again."""
        self.banned |= artifacts
        for old in list(self.banned)[: max(0, len(self.banned) - BANNED_KEPT)]:
            del self.banned[old]

    def guilty_since(self, mark: int, plan: str) -> bool:
        """Whether the plan was condemned after ``len(condemned)`` was mark."""
        return plan in self.condemned[mark:]

    def state(self) -> dict[str, Any]:
        """All of it as JSON, but for what only matters to a publish under way."""
        return {
            "schema": SCHEMA,
            "steps": [_step(step) for step in self.steps],
            "streak": self.streak,
            "trial": None if self.trial is None else _step(self.trial),
            "owed": self.owed,
            "banned": dict(self.banned),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``; ValueError for anything else."""
        try:
            if state["schema"] != SCHEMA:
                raise ValueError(f"ladder: schema {state['schema']!r}, this code reads {SCHEMA}")
            self.steps = [_restored(step) for step in state["steps"]]
            self.streak, self.owed = int(state["streak"]), int(state["owed"])
            self.trial = None if state["trial"] is None else _restored(state["trial"])
            self.banned = {str(name): int(v) for name, v in state["banned"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"ladder: not a stored state: {error!r}") from error


def _step(step: Step) -> dict[str, Any]:
    return {"layers": dict(step.layers), "whole": step.whole, "failures": step.failures}


def _restored(record: Mapping[str, Any]) -> Step:
    unknown = set(record["layers"].values()) - set(BETTER)
    if unknown:
        raise ValueError(f"ladder: unknown scheme {sorted(unknown)[0]!r}")
    return Step(dict(record["layers"]), bool(record["whole"]), int(record["failures"]))
