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

from .summary import SWAPPED, is_number, was_refused

Record = dict[str, Any]

LIMIT = 1000
"""Longest list of records."""
WINDOW = 10
"""Steps at either end whose rewards the summary compares; the first ones are never thinned."""


OUTCOMES = ("accepted", "demoted", "refused", "failed")
"""What publishes are counted as."""


class Records:
    """Steps, publishes, events and totals. Not thread-safe."""

    def __init__(self, previous: Mapping[str, Any] | None) -> None:
        """`previous`: the summary of earlier sessions of the same run, or None. ValueError if it is
        none."""
        before = previous or {}
        self.steps = _records(before, "history", "step")
        self.publishes = _records(before, "publishes", "version")
        self.rollbacks = _records(before, "rollbacks", "step")
        self.events = _records(before, "events")
        self.served: set[int] = {int(version) for version in before.get("served_versions", [])}
        self.tokens = int(_number(before, "tokens"))
        self.rollout_s_before = _number(before, "rollout_s")
        self.wall_s_before = _number(before, "wall_s_before") + _number(before, "wall_s")
        self.outcomes: Counter[str] = Counter({key: int(_number(before, key)) for key in OUTCOMES})
        self.calibrations = int(_number(before, "calibrations"))
        self.calibrate_s = _number(before, "calibrate_s")
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
                self.outcomes.subtract(outcomes(record))
                self.calibrations -= bool(record.get("calibrated"))
                self.calibrate_s -= record.get("calibrate_s") or 0.0
        self.publishes = [r for r in self.publishes if r["version"] <= step]
        self.rollbacks = [r for r in self.rollbacks if r["step"] <= step]

    def add_step(self, record: Record) -> None:
        """A training step that ended."""
        self.settle(record["step"] - 1)
        self.steps.append(record)
        thin(self.steps, "step")

    def add_publish(self, record: Record) -> None:
        """A verdict on a candidate."""
        self.settle(record["version"] - 1)
        self.outcomes.update(outcomes(record))
        self.calibrations += bool(record.get("calibrated"))
        self.calibrate_s += record.get("calibrate_s") or 0.0
        self.publishes.append(record)
        thin(self.publishes, "version")

    def add_rollback(self, record: Record) -> None:
        """A version that served and was taken back."""
        self.settle(record["step"] - 1)
        self.rollbacks.append(record)
        del self.rollbacks[:-LIMIT]

    def add_event(self, record: Record) -> None:
        """Something else worth keeping."""
        self.events.append(record)
        del self.events[:-LIMIT]


def _records(summary: Mapping[str, Any], key: str, numbered: str | None = None) -> list[Record]:
    """The list of records under `key`; ValueError unless each has a number called `numbered`."""
    found = summary.get(key, [])
    for record in found if isinstance(found, list) else [None]:
        if not isinstance(record, dict) or (numbered and not is_number(record.get(numbered))):
            raise ValueError(f"{key}: {str(record)[:80]}, expected records with a {numbered}")
    return list(found)


def _number(summary: Mapping[str, Any], key: str) -> float:
    value = summary.get(key, 0)
    if not is_number(value):
        raise ValueError(f"{key}: {str(value)[:80]}, expected a number")
    return float(value)


def outcomes(publish: Mapping[str, Any]) -> list[str]:
    """Those of OUTCOMES that a publish counts as: accepted or demoted by what serves, refused by
    what was turned down on the way, both if another candidate took over; failed if nothing serves
    and nothing was judged; none of them if it went straight to bf16."""
    verdict, found = publish["verdict"], []
    if verdict in SWAPPED:
        found.append(verdict)
    if was_refused(publish):
        found.append("refused")
    elif verdict == "kept":
        found.append("failed")
    return found


def thin(records: list[Record], key: str) -> None:
    """Once a list has outgrown LIMIT, keeps the first WINDOW records, the newest half of LIMIT, and
    of those between the ones whose number is a multiple of a power of two: a quarter at most."""
    if len(records) > LIMIT:
        stride = 2 ** math.ceil(math.log2(max(2, records[-1][key] / (LIMIT // 4))))
        between = records[WINDOW : -LIMIT // 2]
        records[WINDOW : -LIMIT // 2] = [r for r in between if r[key] % stride == 0]
