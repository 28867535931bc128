"""RolloutSampler: the freshest rollouts, split into what calibrates and what judges.

A rollout belongs to the probe set or to the calibration set by the hash of its prompt. So all
rollouts of one group land on the same side, the two sets never overlap, and a prompt that comes
back later stays where it was.

Plain object, used inside the process that runs the main loop: a rollout is a few hundred integers,
sending it to another process would cost more than keeping it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rollout:
    """One sequence: token_ids is prompt and response together."""

    token_ids: list[int]
    response_start: int
    """Index of the first response token, at least 1."""
    reward: float
    policy_version: int
    """Of the generator that sampled the response."""
    group: str
    """Digest of the prompt; equal for the rollouts of one group."""


def prompt_digest(prompt_ids: Sequence[int]) -> str:
    """32 hex digits that depend on the prompt's tokens alone."""
    data = b"".join(int(token).to_bytes(8, "little", signed=True) for token in prompt_ids)
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def from_episode(episode: Any) -> Rollout | None:
    """Rollout of an episode (completion, reward, policy_version); None if a part is empty."""
    completion = episode.completion
    prompt = [int(token) for token in completion.prompt_ids]
    response = [int(token) for token in completion.token_ids]
    if not prompt or not response:
        return None
    version = getattr(episode, "policy_version", None)
    if version is None:
        version = completion.generator_version
    return Rollout(
        token_ids=prompt + response,
        response_start=len(prompt),
        reward=float(episode.reward or 0.0),
        policy_version=int(version or 0),
        group=prompt_digest(prompt),
    )


class RolloutSampler:
    """Bounded pool of rollouts.

        sampler.offer(episodes)             # as they finish
        sampler.probe(32)                   # freshest of the held-out ones
        sampler.calibration(64)             # freshest of the others

    capacity: rollouts kept in all; each side gets its share, the oldest leave first.
    max_age: rollouts more than this many policy versions behind the newest *rollout* leave. Behind
    the trainer would be wrong: while candidates are refused the generator keeps its version, and a
    pool emptied by age could never judge the next candidate.
    probe_fraction: share of prompts held out for the probe.
    """

    def __init__(self, capacity: int = 512, max_age: int = 4, probe_fraction: float = 0.25) -> None:
        if capacity < 2:
            raise ValueError(f"sampler.capacity must be at least 2, got {capacity}")
        if max_age < 0:
            raise ValueError(f"sampler.max_age must not be negative, got {max_age}")
        if not 0.0 < probe_fraction < 1.0:
            raise ValueError(
                f"sampler.probe_fraction must be between 0 and 1, got {probe_fraction}"
            )
        self.max_age = max_age
        self.probe_fraction = probe_fraction
        probe_capacity = min(capacity - 1, max(1, round(capacity * probe_fraction)))
        self._capacity = {True: probe_capacity, False: capacity - probe_capacity}
        self._pool: dict[bool, list[Rollout]] = {True: [], False: []}

    def is_probe(self, group: str) -> bool:
        """Whether rollouts of a group are held out; depends on the group alone."""
        return int(group[:13], 16) < self.probe_fraction * 16**13

    def offer(self, episodes: Iterable[Any]) -> int:
        """Take the rollouts of finished episodes; returns how many were usable."""
        rollouts = [rollout for e in episodes if (rollout := from_episode(e)) is not None]
        for rollout in rollouts:
            self._pool[self.is_probe(rollout.group)].append(rollout)
        newest = max((r.policy_version for pool in self._pool.values() for r in pool), default=0)
        for side, pool in self._pool.items():
            fresh = [r for r in pool if r.policy_version >= newest - self.max_age]
            fresh.sort(key=lambda r: r.policy_version)  # stable: arrival decides among equals
            self._pool[side] = fresh[-self._capacity[side] :]
        return len(rollouts)

    def probe(self, count: int, max_tokens: int | None = None) -> list[Rollout]:
        """Up to count held-out rollouts, freshest first, none longer than max_tokens."""
        return self._freshest(True, count, max_tokens)

    def calibration(self, count: int, max_tokens: int | None = None) -> list[Rollout]:
        """Up to count rollouts that are not held out, freshest first."""
        return self._freshest(False, count, max_tokens)

    def sizes(self) -> dict[str, int]:
        """Rollouts at hand on each side."""
        return {"probe": len(self._pool[True]), "calibration": len(self._pool[False])}

    def _freshest(self, side: bool, count: int, max_tokens: int | None) -> list[Rollout]:
        fits = [
            r
            for r in reversed(self._pool[side])
            if max_tokens is None or len(r.token_ids) <= max_tokens
        ]
        return fits[:count]
