"""The rollout budget: rollouts never run further ahead than training can use, and never stall."""

import asyncio

from apps.grpo_ptq.pacing import RolloutBudget


async def _blocks(coroutine) -> bool:
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0.01)
    blocked = not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return blocked


async def test_capacity_is_off_by_n_plus_one_batches():
    budget = RolloutBudget(batch_size=8, off_by_n=1)
    for _ in range(4):
        await budget.acquire(4)
    assert await _blocks(budget.acquire(4))
    await budget.delivered(4, kept=4)
    assert await _blocks(budget.acquire(4)), "a waiting episode still uses the budget"
    await budget.release(4)
    assert not await _blocks(budget.acquire(4))


async def test_dropped_episodes_give_their_budget_back():
    budget = RolloutBudget(batch_size=4, off_by_n=0)
    await budget.acquire(4)
    await budget.delivered(4, kept=0)
    assert not await _blocks(budget.acquire(4))


async def test_group_larger_than_the_budget_goes_through_alone():
    budget = RolloutBudget(batch_size=4, off_by_n=0)
    await budget.acquire(16)
    assert await _blocks(budget.acquire(1))
    await budget.delivered(16, kept=16)
    await budget.release(16)
    assert not await _blocks(budget.acquire(16))


async def test_evicted_episodes_are_reclaimed_only_when_rollouts_are_stuck():
    budget = RolloutBudget(batch_size=4, off_by_n=0)
    await budget.acquire(4)
    await budget.delivered(4, kept=4)
    await budget.reclaim_evicted()
    assert await _blocks(budget.acquire(4)), "nobody was stuck: the episodes are still waiting"
    stuck = asyncio.ensure_future(budget.acquire(4))
    await asyncio.sleep(0.01)
    await budget.reclaim_evicted()
    await asyncio.wait_for(stuck, 1)


async def test_cancelled_waiter_leaves_no_trace():
    budget = RolloutBudget(batch_size=1, off_by_n=0)
    await budget.acquire(1)
    assert await _blocks(budget.acquire(1))
    await budget.delivered(1, kept=0)
    await asyncio.wait_for(budget.acquire(1), 1)
