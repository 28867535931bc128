"""How often a calibration round misses its quorum when replicas drop out: simulation and formula.

The simulation drives the real state machine (services.round) on a clock of its own. Replicas work
on one share each for ITEM_S seconds, beat, and claim again when they are done; a replica drops out
with the given probability, and that in one of two ways:

- ``absent``: it never takes part. With a deadline that leaves no time for a second share, a round
  has as many shares as replicas that came, and fails exactly when a binomial variable says so.
- ``dies``: it stops at a random moment of its first share. Whoever is idle takes its share over
  when its heartbeat is missed; whether in time depends on the deadline.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from forge_ptq.services.calibrating import primaries
from forge_ptq.services.round import WAIT, Assignment, Item, WorkRound

ITEM_S = 30
BATCHES = 10
HEARTBEAT_S = 2


@dataclass(frozen=True)
class Scenario:
    """How replicas drop out, and how much time a round has."""

    name: str
    dies: bool
    deadline_items: float
    """The deadline in shares that one replica could do in it."""


SCENARIOS = (
    Scenario("absent, time for one share", dies=False, deadline_items=1.5),
    Scenario("dies at work, time for one share and a half", dies=True, deadline_items=1.5),
    Scenario("dies at work, time for three shares", dies=True, deadline_items=3.0),
)


def finished_shares(
    replicas: int, shares: int, dropout: float, scenario: Scenario, rng: random.Random
) -> int:
    """Shares that have a result when one simulated round is over."""
    end_of: dict[str, float] = {}
    for number in range(replicas):
        drops = rng.random() < dropout
        moment = rng.random() * ITEM_S if scenario.dies else -1.0
        end_of[f"r{number}"] = moment if drops else math.inf
    deadline_s = scenario.deadline_items * ITEM_S
    round_ = WorkRound(
        [Item(f"s{n}") for n in range(shares)], HEARTBEAT_S, deadline_s, 0.0, startup_s=ITEM_S
    )
    working: dict[str, tuple[str, float]] = {}
    """Replica -> (share, when it began)."""
    names = list(end_of)
    rng.shuffle(names)
    for now in map(float, range(math.ceil(deadline_s) + 1)):
        if round_.over(now):
            break
        refused = False
        for name in names:
            if end_of[name] < now:
                continue
            if name in working:
                share, began = working[name]
                done = (now - began) / ITEM_S
                if done >= 1:
                    round_.finish(name, share, None, now)
                elif round_.beat(name, now, int(done * BATCHES)):
                    continue
                del working[name]
            elif refused or now % HEARTBEAT_S:
                continue  # what one idle replica does not get, no other does
            claim = round_.claim(name, now)
            refused = claim is WAIT
            if isinstance(claim, Assignment):
                working[name] = (claim.item.id, now)
    return len(round_.outcome(now).finished)


def failure_rate(
    replicas: int,
    oversample: float,
    dropout: float,
    quorum: float,
    scenario: Scenario,
    rounds: int,
    seed: int = 0,
) -> float:
    """Share of simulated rounds below the quorum."""
    rng = random.Random(f"{seed} {replicas} {oversample} {dropout} {scenario.name}")
    shares = primaries(replicas, oversample)
    failed = sum(
        finished_shares(replicas, shares, dropout, scenario, rng) < quorum * shares
        for _ in range(rounds)
    )
    return failed / rounds


def exact_failure_rate(replicas: int, oversample: float, dropout: float, quorum: float) -> float:
    """The same for ``absent``: P(Binomial(replicas, 1 - dropout) < quorum * shares)."""
    needed = math.ceil(quorum * primaries(replicas, oversample))
    return math.fsum(
        math.comb(replicas, k) * (1 - dropout) ** k * dropout ** (replicas - k)
        for k in range(needed)
    )
