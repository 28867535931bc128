"""RolloutSampler: the freshest rollouts, in three sets that never overlap.

    probe         judges a candidate before it serves
    plan          measures plans during a calibration (mode auto)
    calibration   measures the inputs of the layers

The hash of its prompt says to which set a rollout belongs. So all rollouts of one group land on the
same side, and a prompt that comes back later stays where it was.

Probe and plan rollouts stand for what the generator serves: the freshest, as they come, though of
the probe's one of every prompt first, since rollouts of one prompt say much the same. Calibration
rollouts are to show the layers whatever occurs: they are kept and drawn evenly over three strata,
*high* and *low* (advantage over and under 0) and *zero* (a group without a difference, too easy or
too hard). A stratum that is short is made up for by the others.

Plain object, used inside the process that runs the main loop: a rollout is a few hundred integers,
sending it to another process would cost more than keeping it.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

STRATA = ("high", "low", "zero")
SIDES = ("probe", "plan", "calibration")


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
    advantage: float = 0.0
    """Of its reward over those of its group; only the sign counts here."""
    logprobs: array[float] | None = None
    """Of the response's tokens under the policy that sampled them, fp32 (4 bytes a token); None
    where they are unknown or not finite."""

    def behaviour(self) -> torch.Tensor | None:
        """logprobs as a tensor [R] fp32."""
        import torch

        return None if self.logprobs is None else torch.tensor(self.logprobs)

    @property
    def stratum(self) -> str:
        """high, low or zero."""
        if self.advantage > 0:
            return "high"
        return "low" if self.advantage < 0 else "zero"


def prompt_digest(prompt_ids: Sequence[int]) -> str:
    """32 hex digits that depend on the prompt's tokens alone."""
    data = b"".join(int(token).to_bytes(8, "little", signed=True) for token in prompt_ids)
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def from_episode(episode: Any) -> Rollout | None:
    """Rollout of an episode (completion, reward, policy_version and, where it has one, advantage);
    None if prompt or response is empty."""
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
        advantage=float(getattr(episode, "advantage", None) or 0.0),
        logprobs=_logprobs(getattr(completion, "logprobs", None), len(response)),
    )


def _logprobs(values: Any, count: int) -> array[float] | None:
    """As Rollout keeps them; None if there are not ``count`` finite ones."""
    if values is None or len(values) != count:
        return None
    kept = array("f", (float(value) for value in values))
    return kept if all(map(math.isfinite, kept)) else None


def from_episodes(episodes: Iterable[Any]) -> list[Rollout]:
    """Rollouts of all episodes that have one. Where no episode of a group carries an advantage, it
    is the reward less the mean over the group's episodes among these."""
    rollouts: list[Rollout] = []
    bare: dict[str, list[int]] = {}
    for episode in episodes:
        rollout = from_episode(episode)
        if rollout is None:
            continue
        if getattr(episode, "advantage", None) is None:
            bare.setdefault(rollout.group, []).append(len(rollouts))
        rollouts.append(rollout)
    for members in bare.values():
        rewards = [rollouts[i].reward for i in members]
        if min(rewards) < max(rewards):  # equal ones would leave a rounding error of their mean
            mean = sum(rewards) / len(rewards)
            for i, reward in zip(members, rewards, strict=True):
                rollouts[i] = replace(rollouts[i], advantage=reward - mean)
    return rollouts


class _Side:
    """One set: bounded lists by stratum, each from the oldest to the freshest."""

    def __init__(self, capacity: int, max_tokens: int, strata: Sequence[str]) -> None:
        self.capacity, self.max_tokens = capacity, max_tokens
        self._lists: dict[str, list[Rollout]] = {name: [] for name in strata}
        self._tokens = 0

    def __len__(self) -> int:
        return sum(len(rollouts) for rollouts in self._lists.values())

    def add(self, rollout: Rollout) -> None:
        """By version, then by arrival."""
        name = rollout.stratum if rollout.stratum in self._lists else next(iter(self._lists))
        insort(self._lists[name], rollout, key=lambda r: r.policy_version)
        self._tokens += len(rollout.token_ids)

    def trim(self, oldest: int) -> None:
        """What is of an older version leaves; then, while there is too much, the oldest rollout of
        the fullest stratum."""
        for rollouts in self._lists.values():
            while rollouts and rollouts[0].policy_version < oldest:
                self._tokens -= len(rollouts.pop(0).token_ids)
        while len(self) > self.capacity or self._tokens > self.max_tokens:
            fullest = max(self._lists.values(), key=len)
            self._tokens -= len(fullest.pop(0).token_ids)

    def newest(self) -> int:
        """Version of the freshest rollout, 0 if there is none."""
        return max((r[-1].policy_version for r in self._lists.values() if r), default=0)

    def take(self, count: int, max_tokens: int | None = None) -> list[Rollout]:
        """The freshest of every stratum, in turns, until there are count."""
        queues = [
            [r for r in rollouts if max_tokens is None or len(r.token_ids) <= max_tokens]
            for rollouts in self._lists.values()
        ]
        taken: list[Rollout] = []
        while len(taken) < count and any(queues):
            taken += [queue.pop() for queue in queues if queue]
        return taken[:count]


class RolloutSampler:
    """Bounded pool of rollouts.

        sampler.offer(episodes)             # as they finish
        sampler.probe(128)                  # freshest of those that judge, over many prompts
        sampler.plan(24)                    # freshest of those that plans are measured on
        sampler.calibration(64)             # freshest of the others, evenly over the strata

    capacity, max_tokens: rollouts kept in all, and their tokens; each side gets its share.
    max_age: rollouts more than this many policy versions behind the newest *rollout* leave. Behind
    the trainer would be wrong: while candidates are refused the generator keeps its version, and a
    pool emptied by age could never judge the next candidate.
    probe_fraction: share of prompts held out for the probe. plan_fraction: share of the rest for
    plans.
    """

    def __init__(
        self,
        capacity: int = 512,
        max_age: int = 4,
        probe_fraction: float = 0.25,
        plan_fraction: float = 0.0,
        max_tokens: int = 2_000_000,
    ) -> None:
        if capacity < 2:
            raise ValueError(f"sampler.capacity must be at least 2, got {capacity}")
        if max_age < 0:
            raise ValueError(f"sampler.max_age must not be negative, got {max_age}")
        if not 0.0 < probe_fraction < 1.0:
            raise ValueError(
                f"sampler.probe_fraction must be between 0 and 1, got {probe_fraction}"
            )
        if not 0.0 <= plan_fraction < 1.0:
            raise ValueError(f"plan_fraction must be from 0 to less than 1, got {plan_fraction}")
        if max_tokens < 1:
            raise ValueError(f"sampler.max_tokens must be more than 0, got {max_tokens}")
        self.max_age = max_age
        self._until = (probe_fraction, probe_fraction + (1 - probe_fraction) * plan_fraction)
        probe = min(capacity - 1, max(1, round(capacity * probe_fraction)))
        plan = round((capacity - probe) * plan_fraction)
        parts = {"probe": probe, "plan": plan, "calibration": capacity - probe - plan}
        self._sides = {
            name: _Side(
                rollouts,
                max_tokens * rollouts // capacity,
                STRATA if name == "calibration" else ("all",),
            )
            for name, rollouts in parts.items()
        }

    def side_of(self, group: str) -> str:
        """probe, plan or calibration; depends on the group alone."""
        position = int(group[:13], 16) / 16**13
        probe_until, plan_until = self._until
        if position < probe_until:
            return "probe"
        return "plan" if position < plan_until else "calibration"

    def offer(self, episodes: Iterable[Any]) -> int:
        """Take the rollouts of finished episodes; returns how many were usable."""
        rollouts = from_episodes(episodes)
        for rollout in rollouts:
            self._sides[self.side_of(rollout.group)].add(rollout)
        newest = max(side.newest() for side in self._sides.values())
        for side in self._sides.values():
            side.trim(newest - self.max_age)
        return len(rollouts)

    def probe(self, count: int, max_tokens: int | None = None) -> list[Rollout]:
        """Up to count held-out rollouts, none longer than max_tokens: of every prompt its freshest,
        then of every prompt its second, and so on, each time by freshness.

        Of the same pool, a smaller draw is the start of a larger one. Since ``offer`` changes the
        pool, one publish draws once, as many as it may come to need, and takes slices.
        """
        side = self._sides["probe"]
        freshest = side.take(len(side), max_tokens)
        turns: Counter[str] = Counter()
        turn = []
        for rollout in freshest:
            turn.append(turns[rollout.group])
            turns[rollout.group] += 1
        order = sorted(range(len(freshest)), key=turn.__getitem__)
        return [freshest[index] for index in order[:count]]

    def plan(self, count: int) -> list[Rollout]:
        """Up to count rollouts to measure plans on, freshest first."""
        return self._sides["plan"].take(count)

    def calibration(self, count: int) -> list[Rollout]:
        """Up to count rollouts of the third side: the freshest of every stratum in turns."""
        return self._sides["calibration"].take(count)

    def sizes(self) -> dict[str, int]:
        """Rollouts at hand on each side."""
        return {name: len(side) for name, side in self._sides.items()}
