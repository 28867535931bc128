"""What a WorkRound and those who take part in it say to each other; see round.py."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Wait(enum.Enum):
    """The answer to a claim when nothing is to be had now: ask again within heartbeat_s."""

    WAIT = "wait"


WAIT = Wait.WAIT


@dataclass(frozen=True)
class Item:
    """One piece of work. id is unique in its round; the round does not look at the work."""

    id: str
    work: Any = None


@dataclass(frozen=True)
class Assignment:
    """An item that a replica is to do. attempt counts from 0 over all owners of the item."""

    item: Item
    attempt: int


@dataclass
class Outcome:
    """What became of a round. Replicas are named by their ids, times are seconds."""

    finished: dict[str, Any]
    """Item -> result, in the order of the items."""
    missing: dict[str, str]
    """Item -> why it has no result."""
    owners: dict[str, str]
    """Finished item -> replica whose finish counted."""
    attempts: dict[str, int]
    """Finished item -> attempt that counted."""
    takeovers: list[tuple[str, str, str]]
    """(item, replica that was lost, replica that took over), in order."""
    silent: tuple[str, ...]
    """Replicas of which nothing was heard for 2 heartbeat_s at the end, sorted."""
    lost: tuple[str, ...]
    """Replicas that held an item when they fell silent or stalled, sorted; some may have come
    back."""
    errors: dict[str, str]
    """Replica -> last error it reported."""
    replicas: tuple[str, ...]
    """All that took part, sorted."""
    seconds: float
    expired: bool
    """The deadline passed before all items were settled."""

    @property
    def complete(self) -> bool:
        """Every item has a result."""
        return not self.missing
