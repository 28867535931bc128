"""RolloutSampler: bounds, freshness, and two sides that never meet."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from forge_ptq.runtime import Completion
from forge_ptq.services.sampler import RolloutSampler, from_episode, prompt_digest


@dataclass
class FakeEpisode:
    """What offer() needs of an app's episode."""

    completion: Any
    reward: float | None
    policy_version: int | None
    advantage: float | None = None


def episode(prompt: int, version: int = 0, response: int = 1, length: int = 3) -> FakeEpisode:
    completion = Completion(
        prompt="",
        text="",
        prompt_ids=torch.tensor([7, prompt]),
        token_ids=torch.full((length,), response),
        generator_version=version,
    )
    return FakeEpisode(completion, 1.0, version)


def test_rollouts_carry_tokens_boundary_and_version():
    rollout = from_episode(episode(prompt=9, version=4, response=5))
    assert rollout is not None
    assert rollout.token_ids == [7, 9, 5, 5, 5]
    assert rollout.response_start == 2
    assert (rollout.policy_version, rollout.reward) == (4, 1.0)
    assert all(type(token) is int for token in rollout.token_ids)


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
    assert sampler.sizes() == {"probe": 0, "calibration": 0}


def test_the_two_sides_never_share_a_prompt():
    sampler = RolloutSampler(capacity=10_000, probe_fraction=0.3)
    for version in range(3):
        sampler.offer(episode(p, version, response=r) for p in range(300) for r in range(4))
    probe = {r.group for r in sampler.probe(10_000)}
    calibration = {r.group for r in sampler.calibration(10_000)}
    assert probe
    assert not probe & calibration
    assert len(probe) + len(calibration) == 300
    assert 0.2 < len(probe) / 300 < 0.4


def test_digest_depends_on_all_tokens_and_their_order():
    digests = {prompt_digest(ids) for ids in ([1, 2], [2, 1], [1, 2, 0], [258], [-1])}
    assert len(digests) == 5
    assert prompt_digest([1, 2]) == prompt_digest((1, 2))


def test_capacity_bounds_each_side_and_the_oldest_leave():
    sampler = RolloutSampler(capacity=40, probe_fraction=0.25, max_age=100)
    for version in range(10):
        sampler.offer(episode(p, version) for p in range(50))
    assert sampler.sizes() == {"probe": 10, "calibration": 30}
    assert {r.policy_version for r in sampler.probe(40)} == {9}


def test_freshest_first_by_version_then_arrival():
    sampler = RolloutSampler(capacity=100, probe_fraction=0.5)
    prompt = next(p for p in range(100) if sampler.is_probe(prompt_digest([7, p])))
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


@pytest.mark.parametrize(
    ("kwargs", "key"),
    [({"capacity": 1}, "capacity"), ({"max_age": -1}, "max_age")]
    + [({"probe_fraction": f}, "probe_fraction") for f in (0.0, 1.0, -1.0)],
)
def test_impossible_settings_name_their_key(kwargs, key):
    with pytest.raises(ValueError, match=f"sampler.{key}"):
        RolloutSampler(**kwargs)
