"""The records a run has left so far: steps, publishes, events, and totals over all of them.

They outlive a session: a run that resumes in the same folder starts from what the sessions before
it wrote to summary.json. Lists are bounded: in a long run only every second, fourth, ... of the
older steps and publishes stays, so that the rest still spans the whole run; the totals count all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from .summary import was_refused

Record = dict[str, Any]

LIMIT = 1000
"""Longest list of records."""
WINDOW = 10
"""Steps at either end whose rewards the summary compares; the first ones are never thinned."""


class Records:
    """Steps, publishes, events and totals. Not thread-safe."""

    def __init__(self, previous: Mapping[str, Any] | None) -> None:
        """`previous`: the summary of earlier sessions of the same run, or None."""
        before = previous or {}
        self.steps: list[Record] = list(before.get("history", []))
        self.publishes: list[Record] = list(before.get("publishes", []))
        self.events: list[Record] = list(before.get("events", []))
        self.served: set[int] = set(before.get("served_versions", []))
        self.tokens: int = before.get("tokens", 0)
        self.rollout_s_before: float = before.get("rollout_s", 0.0)
        self.wall_s_before: float = before.get("wall_s_before", 0.0) + before.get("wall_s", 0.0)
        self.outcomes: Counter[str] = Counter(
            {key: before.get(key, 0) for key in ("accepted", "refused", "failed")}
        )
        self.calibrations: int = before.get("calibrations", 0)
        self.calibrate_s: float = before.get("calibrate_s", 0.0)
        self._settled = previous is None

    def settle(self, step: int) -> None:
        """Drops what earlier sessions recorded after training step `step`, where this one goes on.
        Tokens and the run's seconds stay: they were spent. Only the first call acts."""
        if self._settled:
            return
        self._settled = True
        self.steps = [r for r in self.steps if r["step"] <= step]
        self.served = {version for version in self.served if version <= step}
        for record in self.publishes:
            if record["version"] > step:
                self.outcomes[outcome(record)] -= 1
                self.calibrations -= bool(record.get("calibrated"))
                self.calibrate_s -= record.get("calibrate_s") or 0.0
        self.publishes = [r for r in self.publishes if r["version"] <= step]

    def add_step(self, record: Record) -> None:
        """A training step that ended."""
        self.settle(record["step"] - 1)
        self.steps.append(record)
        thin(self.steps, "step")

    def add_publish(self, record: Record) -> None:
        """A verdict on a candidate."""
        self.settle(record["version"] - 1)
        self.outcomes[outcome(record)] += 1
        self.calibrations += bool(record.get("calibrated"))
        self.calibrate_s += record.get("calibrate_s") or 0.0
        self.publishes.append(record)
        thin(self.publishes, "version")

    def add_event(self, record: Record) -> None:
        """Something else worth keeping."""
        self.events.append(record)
        del self.events[:-LIMIT]


def outcome(publish: Mapping[str, Any]) -> str:
    """accepted; refused by the gate; failed on the way there; or unjudged: served in bf16."""
    if publish["verdict"] == "accepted":
        return "accepted"
    if was_refused(publish):
        return "refused"
    return "failed" if publish["verdict"] == "kept" else "unjudged"


def thin(records: list[Record], key: str) -> None:
    """Once a list has outgrown LIMIT, keeps the first WINDOW records, the newest half of LIMIT, and
    of those between the ones whose number is a multiple of a power of two: a quarter at most."""
    if len(records) > LIMIT:
        stride = 2 ** math.ceil(math.log2(max(2, records[-1][key] / (LIMIT // 4))))
        between = records[WINDOW : -LIMIT // 2]
        records[WINDOW : -LIMIT // 2] = [r for r in between if r[key] % stride == 0]
