"""WorkRound: who does what in one round of work that cannot hang. A pure state machine.

    round = WorkRound(items, heartbeat_s=2, deadline_s=120, now=0.0)
    claim = round.claim("host:17", now)      # Assignment | WAIT | None (the round is over)
    go_on = round.beat("host:17", now, 3)    # alive, three batches of its item done
    round.finish("host:17", "share-0", result, now)
    if round.over(now): outcome = round.outcome(now)

Nobody tells a replica what to do: replicas pull. One that dies or hangs stops pulling and beating,
and the next idle replica gets its item with a higher attempt number. So there is no list of
members to keep right, a replica may join at any time, and no single failure can hold a round up.

An owner is *lost* for its item when nothing was heard of it for heartbeat_s (silent), or when it
beats but its progress stands still (stalled). Being lost is a guess: the owner may be slow. It is
a safe one, since every attempt writes under keys of its own and the first finish wins, whoever it
is by; the others are told to stop at their next beat. A wrong guess costs work, never a result.

Progress is the number of batches done. It stands still after max(heartbeat_s, 3 x slowest batch)
without one more, where the slowest batch is that of anybody in the round, since batches are about
equally large. An owner's first batch includes loading weights: it may take startup_s, and until
its second is done 3 x the first.

An item that raised goes to another replica, or back to the same one a heartbeat later if there
is no other. It is given up when the same error was reported for it twice, or any error three
times, or when MAX_ATTEMPTS owners were lost over it. The rest of the round goes on.

Times are seconds on any one clock that never goes back; the caller passes them in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from forge_ptq.services.round_types import WAIT, Assignment, Item, Outcome, Wait

__all__ = ["WAIT", "Assignment", "Item", "Outcome", "Wait", "WorkRound"]

MAX_ATTEMPTS = 6
"""Owners that one item may lose; an item that kills its owners must not kill them for ever."""

SAME_ERRORS = 2
"""Reports of one and the same error after which an item is given up."""

ANY_ERRORS = 3
"""Reports of whatever errors after which an item is given up."""

STALL_FACTOR = 3.0
"""Times the slowest batch without progress after which an owner counts as stalled."""

STARTUP_SHARE = 0.5
"""Default startup_s as a share of deadline_s."""


@dataclass
class _Attempt:
    """One owner's try at an item."""

    replica: str
    number: int
    claimed_at: float
    progress: int = 0
    advances: int = 0
    """Times that progress went up."""
    progress_at: float = 0.0
    first_s: float | None = None
    """Seconds from the claim to the first batch done."""
    ended: bool = False
    """Finished, failed, or given back by its owner."""


@dataclass
class _State:
    """One item with its history."""

    item: Item
    attempts: list[_Attempt] = field(default_factory=list)
    errors: list[tuple[str, str, float]] = field(default_factory=list)
    """(replica, error, when), in order."""
    done: bool = False
    result: Any = None
    winner: _Attempt | None = None
    given_up: str | None = None

    @property
    def settled(self) -> bool:
        return self.done or self.given_up is not None


class WorkRound:
    """See the module's docstring."""

    def __init__(
        self,
        items: Iterable[Item],
        heartbeat_s: float,
        deadline_s: float,
        now: float,
        *,
        startup_s: float | None = None,
    ) -> None:
        if heartbeat_s <= 0 or deadline_s <= 0:
            raise ValueError(
                f"heartbeat_s and deadline_s must be positive, got {heartbeat_s} and {deadline_s}"
            )
        self._states: dict[str, _State] = {}
        for item in items:
            if item.id in self._states:
                raise ValueError(f"item {item.id!r} is given twice")
            self._states[item.id] = _State(item)
        self.heartbeat_s = heartbeat_s
        self.started = now
        self.deadline = now + deadline_s
        self.startup_s = STARTUP_SHARE * deadline_s if startup_s is None else startup_s
        self._seen: dict[str, float] = {}
        self._holds: dict[str, tuple[_State, _Attempt]] = {}
        """Replica -> what it works on."""
        self._errors: dict[str, str] = {}
        self._takeovers: list[tuple[str, str, str]] = []
        self._lost: set[str] = set()
        self._slowest_s = 0.0
        """Slowest batch of anybody after its first."""
        self._settled_at: float | None = now if not self._states else None

    # what replicas say

    def claim(self, replica: str, now: float) -> Assignment | Wait | None:
        """The next thing for an idle replica: an Assignment, WAIT, or None once the round is over.

        A replica that claims holds nothing any more: what it held before is free for others.
        """
        self._seen[replica] = now
        held = self._holds.pop(replica, None)
        if held is not None:
            held[1].ended = True
        if self.over(now):
            return None
        for state in self._states.values():
            if not state.settled and not state.attempts:
                return self._assign(state, replica, now)
        for state in self._states.values():
            if state.settled or self._worked_on(state, now) or self._barred(state, replica, now):
                continue
            if len(state.attempts) >= MAX_ATTEMPTS:
                owners = ", ".join(sorted({a.replica for a in state.attempts}))
                self._give_up(state, f"{MAX_ATTEMPTS} owners were lost: {owners}", now)
                continue
            previous = state.attempts[-1]
            if not previous.ended:
                self._lost.add(previous.replica)
            if previous.replica != replica:
                self._takeovers.append((state.item.id, previous.replica, replica))
            return self._assign(state, replica, now)
        return None if self.over(now) else WAIT

    def beat(self, replica: str, now: float, progress: int | None = None) -> bool:
        """Heartbeat, with the batches of its item done so far. False: drop the item, claim anew."""
        self._seen[replica] = now
        held = self._holds.get(replica)
        if held is None or self.over(now):
            return False
        state, attempt = held
        if state.settled:
            return False
        if progress is not None and progress > attempt.progress:
            self._advance(attempt, progress, now)
        return True

    def finish(self, replica: str, item_id: str, result: Any, now: float) -> bool:
        """Hand a result in. False if it does not count: another one came first, or too late."""
        self._seen[replica] = now
        state = self._state(item_id)
        held = self._holds.get(replica)
        if held is not None and held[0] is state:
            del self._holds[replica]
        own = [attempt for attempt in state.attempts if attempt.replica == replica]
        if not own:
            raise ValueError(f"{replica} finishes {item_id}, which it never claimed")
        own[-1].ended = True
        if state.settled or now >= self.deadline:
            return False
        state.done, state.result, state.winner = True, result, own[-1]
        self._note_settled(now)
        return True

    def fail(self, replica: str, item_id: str, error: str, now: float) -> None:
        """Report that an item raised; another replica will try it, unless it is given up."""
        self._seen[replica] = now
        state = self._state(item_id)
        held = self._holds.get(replica)
        if held is not None and held[0] is state:
            del self._holds[replica]
            held[1].ended = True
        self._errors[replica] = error
        if state.settled:
            return
        state.errors.append((replica, error, now))
        same = sum(other == error for _, other, _ in state.errors)
        if same >= SAME_ERRORS or len(state.errors) >= ANY_ERRORS:
            who = ", ".join(sorted({name for name, _, _ in state.errors}))
            self._give_up(state, f"failed on {who}: {error}", now)

    # what the coordinator asks

    def over(self, now: float) -> bool:
        """Every item is settled, or the deadline has passed."""
        return self._settled_at is not None or now >= self.deadline

    def silent(self, now: float) -> tuple[str, ...]:
        """Replicas not heard of for more than 2 heartbeat_s, sorted."""
        return tuple(
            sorted(r for r, seen in self._seen.items() if now - seen > 2 * self.heartbeat_s)
        )

    def outcome(self, now: float) -> Outcome:
        """The round so far; final once it is over."""
        finished, missing, owners, attempts = {}, {}, {}, {}
        for item_id, state in self._states.items():
            if state.done:
                assert state.winner is not None
                finished[item_id] = state.result
                owners[item_id] = state.winner.replica
                attempts[item_id] = state.winner.number
            else:
                missing[item_id] = state.given_up or self._why_missing(state, now)
        ended = self._settled_at if self._settled_at is not None else min(now, self.deadline)
        late = {
            attempt.replica
            for state in self._states.values()
            for attempt in state.attempts
            if not attempt.ended and not state.settled and not self._alive(attempt, now)
        }
        return Outcome(
            finished=finished,
            missing=missing,
            owners=owners,
            attempts=attempts,
            takeovers=list(self._takeovers),
            silent=self.silent(now),
            lost=tuple(sorted(self._lost | late)),
            errors=dict(self._errors),
            replicas=tuple(sorted(self._seen)),
            seconds=ended - self.started,
            expired=self._settled_at is None and now >= self.deadline,
        )

    # inside

    def _state(self, item_id: str) -> _State:
        if item_id not in self._states:
            raise ValueError(f"this round has no item {item_id!r}")
        return self._states[item_id]

    def _assign(self, state: _State, replica: str, now: float) -> Assignment:
        attempt = _Attempt(replica, len(state.attempts), now, progress_at=now)
        state.attempts.append(attempt)
        self._holds[replica] = (state, attempt)
        return Assignment(state.item, attempt.number)

    def _worked_on(self, state: _State, now: float) -> bool:
        return any(not a.ended and self._alive(a, now) for a in state.attempts)

    def _barred(self, state: _State, replica: str, now: float) -> bool:
        """It failed on this item, and another replica may still do better."""
        failed = {name for name, _, _ in state.errors}
        if replica not in failed:
            return False
        others = set(self._seen) - failed - set(self.silent(now))
        return bool(others) or now - state.errors[-1][2] < self.heartbeat_s

    def _alive(self, attempt: _Attempt, now: float) -> bool:
        """The owner beats, and its progress does not stand still."""
        if now - self._seen[attempt.replica] > self.heartbeat_s:
            return False
        if attempt.first_s is None:
            return now - attempt.claimed_at <= self.startup_s
        batch_s = self._slowest_s or attempt.first_s
        if attempt.advances == 1:
            batch_s = max(batch_s, attempt.first_s)
        limit = max(self.heartbeat_s, STALL_FACTOR * batch_s)
        return now - attempt.progress_at <= limit

    def _advance(self, attempt: _Attempt, progress: int, now: float) -> None:
        gap = now - attempt.progress_at
        if attempt.first_s is None:
            attempt.first_s = gap
        else:
            batch_s = gap / (progress - attempt.progress)
            # A process that was stopped and goes on must not teach that batches take minutes.
            believable_s = 2 * STALL_FACTOR * max(self._slowest_s, self.heartbeat_s)
            self._slowest_s = max(self._slowest_s, min(batch_s, believable_s))
        attempt.progress, attempt.progress_at = progress, now
        attempt.advances += 1

    def _why_missing(self, state: _State, now: float) -> str:
        if not state.attempts:
            return "no replica took it"
        last = state.attempts[-1]
        if state.errors:
            replica, error, _ = state.errors[-1]
            return f"failed on {replica}: {error}"
        if last.ended or not self._alive(last, now):
            return f"{last.replica} was lost with it"
        return f"{last.replica} was still at work"

    def _give_up(self, state: _State, reason: str, now: float) -> None:
        state.given_up = reason
        self._note_settled(now)

    def _note_settled(self, now: float) -> None:
        if all(state.settled for state in self._states.values()):
            self._settled_at = now
