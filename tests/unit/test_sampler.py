"""RolloutSampler: bounds, freshness, and two sides that never meet."""

import math
import pickle
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from forge_ptq.runtime import Completion
from forge_ptq.services.sampler import (
    SIDES,
    RolloutSampler,
    from_episode,
    from_episodes,
    prompt_digest,
)


@dataclass
class FakeEpisode:
    """What offer() needs of an app's episode."""

    completion: Any
    reward: float | None
    policy_version: int | None
    advantage: float | None = None


def episode(
    prompt: int,
    version: int = 0,
    response: int = 1,
    length: int = 3,
    reward: float = 1.0,
    advantage: float | None = None,
) -> FakeEpisode:
    completion = Completion(
        prompt="",
        text="",
        prompt_ids=torch.tensor([7, prompt]),
        token_ids=torch.full((length,), response),
        generator_version=version,
    )
    return FakeEpisode(completion, reward, version, advantage)


def test_rollouts_carry_tokens_boundary_and_version():
    rollout = from_episode(episode(prompt=9, version=4, response=5))
    assert rollout is not None
    assert rollout.token_ids == [7, 9, 5, 5, 5]
    assert rollout.response_start == 2
    assert (rollout.policy_version, rollout.reward) == (4, 1.0)
    assert all(type(token) is int for token in rollout.token_ids)


def test_logprobs_are_kept_in_four_bytes_a_token():
    one = episode(1)
    (rollout,) = from_episodes([one])
    assert rollout.logprobs is None
    assert rollout.behaviour() is None
    one.completion.logprobs = torch.tensor([-0.1, -2.0, 0.0])
    (rollout,) = from_episodes([one])
    assert rollout.logprobs is not None
    assert rollout.logprobs.itemsize * len(rollout.logprobs) == 12
    torch.testing.assert_close(rollout.behaviour(), one.completion.logprobs, rtol=0, atol=0)
    assert pickle.loads(pickle.dumps(rollout)) == rollout


@pytest.mark.parametrize(
    "logprobs", [[-1.0] * 2, [-1.0] * 4, [-1.0, math.nan, -1.0], [-math.inf] * 3]
)
def test_logprobs_that_cannot_be_used_are_unknown(logprobs):
    one = episode(1)
    one.completion.logprobs = torch.tensor(logprobs)
    rollout = from_episode(one)
    assert rollout is not None
    assert rollout.logprobs is None


def test_the_probe_spreads_over_prompts_and_larger_draws_begin_with_smaller_ones():
    sampler = RolloutSampler(capacity=200, probe_fraction=0.5, max_age=9)
    prompts = [p for p in range(99) if sampler.side_of(prompt_digest([7, p])) == "probe"][:5]
    for version in range(3):
        sampler.offer(episode(p, version, response=r) for p in prompts for r in range(1, 4))
    drawn = sampler.probe(45)
    assert len(drawn) == 45
    for turn in range(0, 45, 5):
        assert len({r.group for r in drawn[turn : turn + 5]}) == 5
    assert [r.policy_version for r in drawn[:15]] == [2] * 15
    for count in range(46):
        assert sampler.probe(count) == drawn[:count]
    sampler.offer([episode(prompts[0], 3)])
    assert sampler.probe(45) != drawn, "why a publish draws once"


def test_version_falls_back_to_the_completions():
    one = episode(1, version=6)
    one.policy_version = None
    rollout = from_episode(one)
    assert rollout is not None
    assert rollout.policy_version == 6


@pytest.mark.parametrize("field", ["prompt_ids", "token_ids"])
def test_empty_parts_are_skipped(field):
    one = episode(1)
    setattr(one.completion, field, torch.tensor([], dtype=torch.long))
    sampler = RolloutSampler()
    assert sampler.offer([one]) == 0
    assert sampler.sizes() == dict.fromkeys(SIDES, 0)


def test_the_sides_never_share_a_prompt_and_get_their_shares():
    sampler = RolloutSampler(capacity=10_000, probe_fraction=0.3, plan_fraction=0.4)
    for version in range(3):
        sampler.offer(episode(p, version, response=r) for p in range(300) for r in range(4))
    drawn = [sampler.probe(10_000), sampler.plan(10_000), sampler.calibration(10_000)]
    groups = [{r.group for r in rollouts} for rollouts in drawn]
    for index, side in enumerate(groups):
        assert side
        assert all(side.isdisjoint(other) for other in groups[:index])
    assert sum(map(len, groups)) == 300
    assert 0.2 < len(groups[0]) / 300 < 0.4
    assert 0.18 < len(groups[1]) / 300 < 0.38  # 0.7 * 0.4


def test_digest_depends_on_all_tokens_and_their_order():
    digests = {prompt_digest(ids) for ids in ([1, 2], [2, 1], [1, 2, 0], [258], [-1])}
    assert len(digests) == 5
    assert prompt_digest([1, 2]) == prompt_digest((1, 2))


def test_capacity_bounds_each_side_and_the_oldest_leave():
    sampler = RolloutSampler(capacity=40, probe_fraction=0.25, max_age=100)
    for version in range(10):
        sampler.offer(episode(p, version) for p in range(50))
    assert sampler.sizes() == {"probe": 10, "plan": 0, "calibration": 30}
    assert {r.policy_version for r in sampler.probe(40)} == {9}


def test_freshest_first_by_version_then_arrival():
    sampler = RolloutSampler(capacity=100, probe_fraction=0.5)
    prompt = next(p for p in range(100) if sampler.side_of(prompt_digest([7, p])) == "probe")
    sampler.offer([episode(prompt, version=2, response=1), episode(prompt, 2, response=2)])
    sampler.offer([episode(prompt, version=1, response=3)])  # a straggler of an older policy
    assert [r.token_ids[-1] for r in sampler.probe(10)] == [2, 1, 3]
    assert [r.token_ids[-1] for r in sampler.probe(1)] == [2]


def test_age_counts_from_the_newest_rollout():
    sampler = RolloutSampler(capacity=100, max_age=2, probe_fraction=0.5)
    sampler.offer(episode(p, version=3) for p in range(20))
    assert sum(sampler.sizes().values()) == 20
    sampler.offer([episode(0, version=6)])
    assert sum(sampler.sizes().values()) == 1


def test_long_rollouts_can_be_left_out():
    sampler = RolloutSampler(capacity=100, probe_fraction=0.5)
    sampler.offer(episode(p, length=5 + p) for p in range(20))
    everything = sampler.probe(100)
    short = sampler.probe(100, max_tokens=12)
    assert short == [r for r in everything if len(r.token_ids) <= 12]
    assert 0 < len(short) < len(everything)


def calibration_prompts(sampler: RolloutSampler, count: int) -> list[int]:
    prompts = (p for p in range(10_000) if sampler.side_of(prompt_digest([7, p])) == "calibration")
    return [next(prompts) for _ in range(count)]


def test_calibration_is_even_over_the_strata_and_fresh():
    sampler = RolloutSampler(capacity=400, max_age=100, probe_fraction=0.1)
    prompts = calibration_prompts(sampler, 3)
    for version in range(20):
        for prompt, advantage, copies in zip(prompts, (1.5, -0.5, 0.0), (1, 2, 6), strict=True):
            sampler.offer(episode(prompt, version, advantage=advantage) for _ in range(copies))
    drawn = sampler.calibration(12)
    assert Counter(r.stratum for r in drawn) == {"high": 4, "low": 4, "zero": 4}
    versions = {s: [r.policy_version for r in drawn if r.stratum == s] for s in ("high", "low")}
    assert versions == {"high": [19, 18, 17, 16], "low": [19, 19, 18, 18]}
    # 20 high, 40 low, 120 zero: the first two run out and zero makes up for it.
    assert Counter(r.stratum for r in sampler.calibration(150)) == {
        "high": 20, "low": 40, "zero": 90,
    }  # fmt: skip
    assert len(sampler.calibration(1000)) == 180


def test_a_flood_of_groups_without_difference_does_not_push_the_others_out():
    sampler = RolloutSampler(capacity=40, max_age=100, probe_fraction=0.25)
    one, other = calibration_prompts(sampler, 2)
    sampler.offer(episode(one, 0, advantage=a) for a in (1.0, -1.0) * 5)
    for version in range(1, 50):
        sampler.offer(episode(other, version, advantage=0.0) for _ in range(8))
    drawn = Counter(r.stratum for r in sampler.calibration(30))
    assert drawn == {"high": 5, "low": 5, "zero": 20}


def test_probe_and_plan_are_not_stratified():
    sampler = RolloutSampler(capacity=100, probe_fraction=0.5, plan_fraction=0.5)
    for name in ("probe", "plan"):
        prompt = next(p for p in range(999) if sampler.side_of(prompt_digest([7, p])) == name)
        advantages = [1.0, 0.0, 0.0, 0.0, -1.0, 0.0]
        sampler.offer(episode(prompt, advantage=a) for a in advantages)
        drawn = getattr(sampler, name)(4)
        assert [r.advantage for r in drawn] == advantages[:1:-1]


def test_advantage_is_the_apps_or_else_relative_to_the_group_offered():
    given = from_episodes([episode(1, reward=1.0, advantage=-2.0), episode(1, reward=0.0)])
    assert [r.stratum for r in given] == ["low", "zero"]
    episodes = [episode(1, reward=r) for r in (0.1, 0.1, 0.4)]
    episodes += [episode(2, reward=0.1) for _ in range(3)]
    computed = from_episodes(episodes)
    assert [r.stratum for r in computed] == ["low", "low", "high", "zero", "zero", "zero"]
    assert sum(r.advantage for r in computed) == pytest.approx(0.0)
    assert [r.reward for r in computed] == [0.1, 0.1, 0.4, 0.1, 0.1, 0.1]


@pytest.mark.parametrize("seed", range(6))
def test_bounds_hold_whatever_comes(seed):
    """Random streams against what a reader of the docstring would compute from the whole past."""
    rng = random.Random(seed)
    capacity, max_age, max_tokens = rng.randint(2, 60), rng.randint(0, 3), rng.randint(1, 900)
    settings: dict[str, Any] = {
        "capacity": capacity, "max_age": max_age, "max_tokens": max_tokens,
        "probe_fraction": rng.uniform(0.1, 0.9), "plan_fraction": rng.choice([0.0, 0.3, 0.6]),
    }  # fmt: skip
    sampler, twin = RolloutSampler(**settings), RolloutSampler(**settings)
    newest = 0
    homes: dict[str, Any] = {}
    for _ in range(40):
        batch = []
        for _ in range(rng.randint(0, 8)):
            version = max(0, newest + rng.randint(-4, 1))
            newest = max(newest, version)
            size = rng.choice([1, 2, 30])
            batch.append(
                episode(rng.randint(0, 40), version, length=size, advantage=rng.randint(-1, 1))
            )
        sampler.offer(batch)
        twin.offer(batch)
        sides = {name: getattr(sampler, name)(1000) for name in SIDES}
        assert sides == {name: getattr(twin, name)(1000) for name in SIDES}
        assert {name: len(rollouts) for name, rollouts in sides.items()} == sampler.sizes()
        kept = [r for rollouts in sides.values() for r in rollouts]
        assert len(kept) <= capacity
        assert sum(len(r.token_ids) for r in kept) <= max_tokens
        if kept:
            # A newest rollout may itself have been too long to keep.
            freshest = max(r.policy_version for r in kept)
            assert min(r.policy_version for r in kept) >= freshest - max_age
        for name, rollouts in sides.items():
            for rollout in rollouts:
                assert homes.setdefault(rollout.group, name) == name
            for count in (0, 1, 5):
                assert getattr(sampler, name)(count) == rollouts[:count]


@pytest.mark.parametrize(
    ("kwargs", "key"),
    [({"capacity": 1}, "capacity"), ({"max_age": -1}, "max_age")]
    + [({"probe_fraction": f}, "probe_fraction") for f in (0.0, 1.0, -1.0)]
    + [({"max_tokens": 0}, "max_tokens")],
)
def test_impossible_settings_name_their_key(kwargs, key):
    with pytest.raises(ValueError, match=f"sampler.{key}"):
        RolloutSampler(**kwargs)
