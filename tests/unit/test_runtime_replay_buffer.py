"""The replay buffer's rules, called without an actor around them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from forge_ptq.runtime.own.replay_buffer import ReplayBuffer


@dataclass
class Episode:
    """Just enough of one."""

    number: int
    policy_version: int = 0


def call(buffer: ReplayBuffer, name: str, *args: Any) -> Any:
    """Runs an endpoint's function in this process."""
    endpoint: Any = getattr(ReplayBuffer, name)
    return asyncio.run(endpoint._method(buffer, *args))


def filled(count: int, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(**{"batch_size": 2, "seed": 0, **options})
    for number in range(count):
        call(buffer, "add", Episode(number, policy_version=number))
    return buffer


def numbers(buffer: ReplayBuffer) -> list[int]:
    return [entry.episode.number for entry in buffer.entries]


def test_shape_of_a_sample() -> None:
    buffer = filled(6, dp_size=3)
    shards = call(buffer, "sample", 0)
    assert [len(shard) for shard in shards] == [2, 2, 2]
    drawn = [episode.number for shard in shards for episode in shard]
    assert sorted(drawn) == list(range(6))


def test_too_few_episodes() -> None:
    buffer = filled(1)
    assert call(buffer, "sample", 0) is None
    assert call(buffer, "_numel") == 1


@pytest.mark.parametrize(("age", "kept"), [(0, [4]), (1, [3, 4]), (None, [0, 1, 2, 3, 4])])
def test_old_episodes_are_evicted(age: int | None, kept: list[int]) -> None:
    buffer = filled(5, max_policy_age=age)
    call(buffer, "evict", 4)
    assert numbers(buffer) == kept


@pytest.mark.parametrize(("limit", "samples"), [(0, 1), (2, 3), (None, 10)])
def test_episodes_are_sampled_once_and_max_resample_count_times_more(
    limit: int | None, samples: int
) -> None:
    buffer = filled(2, max_resample_count=limit)
    got = [call(buffer, "sample", 0) for _ in range(10)]
    assert sum(batch is not None for batch in got) == samples


def test_full_buffer_drops_the_oldest() -> None:
    assert numbers(filled(5, max_buffer_size=3)) == [2, 3, 4]


def test_draws_are_a_function_of_the_seed_and_survive_a_checkpoint() -> None:
    a, b = (filled(50, seed=7, max_resample_count=None) for _ in range(2))
    first = [call(a, "sample", 0) for _ in range(3)]
    assert first == [call(b, "sample", 0) for _ in range(3)]
    other = filled(50, seed=8, max_resample_count=None)
    assert first != [call(other, "sample", 0) for _ in range(3)]
    state = call(a, "state_dict")
    restored = ReplayBuffer(batch_size=2, seed=99, max_resample_count=None)
    call(restored, "load_state_dict", state)
    assert [call(restored, "sample", 0) for _ in range(3)] == [
        call(a, "sample", 0) for _ in range(3)
    ]


def test_collate_gets_the_shards() -> None:
    buffer = filled(2, collate=lambda shards: ("collated", len(shards)))
    assert call(buffer, "sample", 0) == ("collated", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size = 0"),
        ({"dp_size": True}, "dp_size = True"),
        ({"max_policy_age": -1}, "max_policy_age = -1"),
        ({"max_buffer_size": 1}, "max_buffer_size = 1: expected int >= 2"),
        ({"collate": "pad"}, "collate = 'pad'"),
    ],
)
def test_wrong_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayBuffer(**{"batch_size": 2, **options})
