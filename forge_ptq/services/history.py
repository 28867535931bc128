"""What serves and what served before it, as the publisher remembers it: what could be gone back to,
and what must therefore stay in the store. Pure: no I/O, no actors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forge_ptq.artifact import ArtifactRef
from forge_ptq.services.passage import Passage, State

HISTORY = 64
RETAINED = 4
"""Artifacts on probation that stay in the store, in case they are confirmed and gone back to."""
FULL_PRECISION = "bf16"
"""Plan of artifacts without a quantized layer."""


def plan_of(layers: Mapping[str, str]) -> str:
    """Names the schemes of all layers: equal for artifacts of one plan."""
    if set(layers.values()) <= {"bf16"}:
        return FULL_PRECISION
    text = json.dumps(sorted(layers.items()))
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


@dataclass
class Served:
    """An artifact that serves or has served."""

    ref: ArtifactRef
    plan: str
    passage: Passage
    stored: bool = True
    """Whether it is in the store, as far as is known."""

    @property
    def quantized(self) -> bool:
        """Whether any layer is."""
        return self.plan != FULL_PRECISION

    @property
    def confirmed(self) -> bool:
        """Its probation went well, or it needs none."""
        return self.passage.state is State.CONFIRMED


class History:
    """In the order in which they last began to serve; the last one serves."""

    def __init__(self) -> None:
        self.history: list[Served] = []
        self.companion: ArtifactRef | None = None
        """bf16 artifact of the serving version that may serve beside it."""
        self._companions: dict[str, str] = {}
        """Artifact id -> plan that it accompanies."""
        self.oldest_usable: int | None = None
        """Oldest version whose rollouts can still be trained on, if that is known."""
        self.last_plan = FULL_PRECISION
        """Of the last quantized artifact that was committed."""

    @property
    def current(self) -> Served | None:
        """What serves."""
        return self.history[-1] if self.history else None

    def find(self, artifact_id: str) -> Served | None:
        """An artifact that serves or has served."""
        return next((s for s in self.history if s.ref.artifact_id == artifact_id), None)

    def plan_behind(self, artifact_id: str) -> str | None:
        """Plan of an artifact that serves or has served, of a companion the one it accompanies."""
        served = self.find(artifact_id)
        return served.plan if served is not None else self._companions.get(artifact_id)

    def enter(self, served: Served) -> None:
        """It serves now."""
        self.companion = None
        self.history = [s for s in self.history if s.ref != served.ref]
        self.history.append(served)
        if served.quantized:
            self.last_plan = served.plan
        safe = next(self.targets(), None)
        extra = max(0, len(self.history) - HISTORY)
        self.history = [s for s in self.history[:extra] if s is safe] + self.history[extra:]

    def targets(self) -> Iterator[Served]:
        """What could be gone back to, newest first: confirmed, stored, and not what serves."""
        return (s for s in reversed(self.history[:-1]) if s.confirmed and s.stored)

    def kept(self) -> set[str]:
        """Artifacts that must stay in the store: what serves, what served before it, its companion,
        what would be gone back to, and what may yet be confirmed for that."""
        gone = (State.CONDEMNED, State.ROLLED_BACK)
        served = [s for s in self.history[-2:-1] if s.passage.state not in gone]
        served += [*self.history[-1:], *list(self.targets())[:1]]
        if self.oldest_usable is not None:
            usable = [s for s in self.history if s.ref.policy_version >= self.oldest_usable]
            served += [s for s in usable if s.passage.state is State.PROBATION][-RETAINED:]
        refs = [s.ref for s in served] + ([self.companion] if self.companion else [])
        return {ref.artifact_id for ref in refs}

    def found(self, stored: Collection[str]) -> None:
        """What the store holds: confirmed late, what it has dropped is nothing to go back to."""
        for served in self.history:
            served.stored = served.ref.artifact_id in stored

    # ---- as JSON

    def state(self) -> list[list[Any]]:
        """History as JSON."""
        return [
            [s.ref.artifact_id, s.ref.policy_version, s.plan, str(s.passage.state)]
            for s in self.history
        ]

    def restore(self, records: list[list[Any]], committed: ArtifactRef | None) -> None:
        """Inverse of ``state``, except that only what is committed can serve: unless it is among
        the records, ``enter`` it next. ValueError for anything that is no such state."""
        try:
            found = [
                Served(ArtifactRef(str(i), int(v)), str(plan), Passage(int(v), State(state)))
                for i, v, plan, state in records
            ]
        except (TypeError, ValueError) as error:
            raise ValueError(f"serving: not a stored state: {error}") from error
        quantized = [s.plan for s in found if s.quantized]
        self.last_plan = quantized[-1] if quantized else FULL_PRECISION
        if committed is not None:
            found.sort(key=lambda served: served.ref == committed)  # last, if it is among them
            self.history = found
