"""The rollout budget: nothing is generated that is too old to train on, and nothing stalls."""

import asyncio

import pytest

from apps.grpo_ptq.pacing import RolloutBudget, oldest_usable


async def _blocks(coroutine) -> bool:
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0.01)
    blocked = not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return blocked


async def test_off_by_n_batches_ahead_of_the_served_version():
    budget = RolloutBudget(batch_size=8, off_by_n=1)
    for _ in range(4):
        await budget.acquire(4)
    assert await _blocks(budget.acquire(4))
    await budget.delivered(16, kept=16)
    assert await _blocks(budget.acquire(4)), "waiting episodes count"
    await budget.taken(8)
    assert await _blocks(budget.acquire(4)), "version 0 must not start what only step 2 could take"
    await budget.serves(1)
    assert not await _blocks(budget.acquire(4))


async def test_synchronous_waits_for_the_next_version():
    budget = RolloutBudget(batch_size=4, off_by_n=0)
    await budget.acquire(4)
    await budget.delivered(4, kept=4)
    await budget.taken(4)
    assert await _blocks(budget.acquire(4))
    await budget.serves(1)
    assert not await _blocks(budget.acquire(4))


async def test_refused_version_leaves_the_rest_of_the_bound():
    budget = RolloutBudget(batch_size=4, off_by_n=1)
    await budget.acquire(4)
    await budget.delivered(4, kept=4)
    await budget.taken(4)  # makes version 1, which is refused: version 0 serves on
    assert not await _blocks(budget.acquire(4)), "an episode of version 0 may train step 1"


async def test_resumed_run_starts_where_it_stood():
    budget = RolloutBudget(batch_size=4, off_by_n=0, step=7, version=7)
    assert not await _blocks(budget.acquire(4))
    assert await _blocks(budget.acquire(1))


async def test_dropped_episodes_give_their_budget_back():
    budget = RolloutBudget(batch_size=4, off_by_n=0)
    await budget.acquire(4)
    await budget.delivered(4, kept=0)
    assert not await _blocks(budget.acquire(4))


async def test_group_larger_than_the_bound_goes_through_alone():
    budget = RolloutBudget(batch_size=4, off_by_n=0)
    await budget.acquire(16)
    assert await _blocks(budget.acquire(1))
    await budget.delivered(16, kept=16)
    await budget.taken(4)
    await budget.serves(1)
    assert await _blocks(budget.acquire(16)), "twelve episodes still wait"


async def test_evicted_episodes_are_made_up_for_only_when_rollouts_are_stuck():
    budget = RolloutBudget(batch_size=4, off_by_n=0)
    await budget.acquire(4)
    await budget.delivered(4, kept=4)
    await budget.reclaim_evicted()
    assert await _blocks(budget.acquire(4)), "nobody was stuck: the episodes are still waiting"
    stuck = asyncio.ensure_future(budget.acquire(4))
    await asyncio.sleep(0.01)
    await budget.reclaim_evicted()
    await asyncio.wait_for(stuck, 1)


async def test_episodes_taken_before_their_group_is_delivered_are_counted_once():
    budget = RolloutBudget(batch_size=4, off_by_n=0)
    await budget.acquire(4)
    await budget.taken(4)
    await budget.delivered(4, kept=4)
    await budget.serves(1)
    assert not await _blocks(budget.acquire(4)), "nothing waits and nothing is in flight"
    assert await _blocks(budget.acquire(1))


async def test_cancelled_waiter_leaves_no_trace():
    budget = RolloutBudget(batch_size=1, off_by_n=0)
    await budget.acquire(1)
    assert await _blocks(budget.acquire(1))
    await budget.delivered(1, kept=0)
    await asyncio.wait_for(budget.acquire(1), 1)


@pytest.mark.parametrize(
    ("step", "every", "off_by_n", "expected"),
    [
        (4, 1, 1, 3),  # step 5 trains on version 4 or 3; then version 5 is published
        (4, 1, 0, 4),
        (4, 4, 3, 4),  # steps 5 to 8 train version 4 to 7
        (6, 4, 3, 4),  # resumed in between: steps 7 and 8
        (9, 4, 1, 8),  # step 10 is the last
        (10, 4, 1, 8),  # nothing is trained any more
    ],
)
def test_oldest_version_that_may_serve(step, every, off_by_n, expected):
    assert oldest_usable(step, 10, every, off_by_n) == expected
