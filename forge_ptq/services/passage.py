"""The states of one version, from its first candidate to what becomes of what serves. Pure.

                   more rollouts
                     +------+
                     |      v
    PREPARE -------> PROBED ------> ACCEPTED ------> COMMITTED -----------> CONFIRMED
     ^ ^ |             |               |                | quantized         ^      |
     | | |        gate |    plan found |                v                   |      | fails later
     | | |             v        guilty |             PROBATION -------------+      |
     | | |          REFUSED <----------+                | fails                    |
     | | |             |                                v                          |
     | | |             +--> DEMOTE (attempt n) --+   CONDEMNED <-------------------+
     | +-|-------------|-------------------------+      | while it or its plan serves
     |   |             +--> BF16 --+                    v
     +---|-------------|-----------+                 ROLLED_BACK
         |             +--> KEEP
         +--> FAILED --> BF16 | KEEP          FAILED: from every state before COMMITTED

``PREPARE`` is calibrate (if due), quantize and stage. Full precision needs no scores: from PREPARE
straight to ACCEPTED, from COMMITTED to CONFIRMED. Before the first candidate, PREPARE goes to
PROMOTE, DEMOTE or BF16 (and back) for what is due or owed, see ladder.py. Any other transition
raises LadderError: it would be a bug in the publisher. Each carries the numbers that caused it.

A publish takes the arrows up to COMMITTED, KEEP (climb.py); what happens afterwards is live
traffic's say (watch.py). What is remembered between publishes is in ladder.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class LadderError(RuntimeError):
    """A transition that the state machine does not have."""


class State(StrEnum):
    """See the module's docstring."""

    PREPARE = "prepare"
    PROBED = "probed"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    FAILED = "failed"
    DEMOTE = "demote"
    PROMOTE = "promote"
    BF16 = "bf16"
    KEEP = "keep"
    COMMITTED = "committed"
    PROBATION = "probation"
    CONFIRMED = "confirmed"
    CONDEMNED = "condemned"
    ROLLED_BACK = "rolled_back"


_S = State
ALLOWED: Mapping[State, frozenset[State]] = {
    _S.PREPARE: frozenset(
        {
            _S.PROBED,
            _S.ACCEPTED,
            _S.REFUSED,
            _S.FAILED,
            _S.PROMOTE,
            _S.DEMOTE,
            _S.BF16,
            _S.KEEP,
        }
    ),
    _S.PROMOTE: frozenset({_S.PREPARE}),
    _S.PROBED: frozenset({_S.PROBED, _S.ACCEPTED, _S.REFUSED, _S.FAILED}),
    _S.ACCEPTED: frozenset({_S.COMMITTED, _S.REFUSED, _S.FAILED}),
    _S.REFUSED: frozenset({_S.DEMOTE, _S.BF16, _S.KEEP, _S.FAILED}),
    _S.FAILED: frozenset({_S.BF16, _S.KEEP}),
    _S.DEMOTE: frozenset({_S.PREPARE}),
    _S.BF16: frozenset({_S.PREPARE}),
    _S.KEEP: frozenset(),
    _S.COMMITTED: frozenset({_S.PROBATION, _S.CONFIRMED}),
    _S.PROBATION: frozenset({_S.CONFIRMED, _S.CONDEMNED}),
    _S.CONFIRMED: frozenset({_S.CONDEMNED}),
    _S.CONDEMNED: frozenset({_S.ROLLED_BACK}),
    _S.ROLLED_BACK: frozenset(),
}


@dataclass(frozen=True)
class Transition:
    """One arrow of the diagram, and the numbers that caused it."""

    from_: str
    to: str
    why: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    version: int = 0
    artifact_id: str | None = None

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self.numbers.items())
        which = f" {self.artifact_id}" if self.artifact_id else ""
        text = f"version {self.version}{which}: {self.from_} -> {self.to}: {self.why}"
        return f"{text} ({numbers})" if numbers else text


class Passage:
    """The state of one version. Raises LadderError for an arrow that the diagram does not have."""

    def __init__(self, version: int, state: State = State.PREPARE) -> None:
        self.version = version
        self.state = state
        self.transitions: list[Transition] = []

    def to(
        self,
        state: State,
        why: str,
        numbers: Mapping[str, float] | None = None,
        artifact_id: str | None = None,
    ) -> Transition:
        """Take an arrow; numbers that are not finite are left as they are."""
        if state not in ALLOWED[self.state]:
            raise LadderError(
                f"version {self.version}: no transition from {self.state} to {state} ({why}); "
                f"expected one of {', '.join(sorted(ALLOWED[self.state])) or 'none'}"
            )
        taken = Transition(
            str(self.state), str(state), why, dict(numbers or {}), self.version, artifact_id
        )
        self.state = state
        self.transitions.append(taken)
        return taken


def finite(numbers: Mapping[str, float | None]) -> dict[str, float]:
    """The numbers that were measured and are numbers."""
    return {k: float(v) for k, v in numbers.items() if v is not None and math.isfinite(v)}
