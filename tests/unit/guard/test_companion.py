"""The full-precision companion and the A/B test; over doubles."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from forge_ptq import store
from forge_ptq.artifact import ArtifactRef
from forge_ptq.services.fleet import FleetError
from tests.integration.publish_doubles import FakeFleet, Generators
from tests.unit.guard.support import (
    LAYERS,
    agree,
    arm,
    bad_below,
    held,
    launch,
    records,
)


async def test_the_companion_is_made_kept_and_replaced():
    generators, fleet = Generators(2), FakeFleet("int8_static", LAYERS)
    ptq = await launch(generators, fleet, precision_by_load__enabled=True)
    first = await ptq.publish(1)
    beside = await ptq.accompanied()
    assert beside is not None
    assert [r.companion for r in generators.replicas] == [beside.artifact_id] * 2
    assert set(await store.artifact_ids()) == {first.artifact_id, beside.artifact_id}
    generators.replicas[0].kl = bad_below(9)
    ptq.cfg.guard.on_reject = ["keep"]
    kept = await ptq.publish(2)
    assert (kept.outcome, await ptq.accompanied()) == ("kept", beside)
    assert [r.companion for r in generators.replicas] == [beside.artifact_id] * 2
    generators.replicas[0].kl = 0.01
    await ptq.publish(3)
    assert await ptq.accompanied() not in (None, beside)
    assert beside.artifact_id not in await store.artifact_ids()
    await agree(generators, ptq)


@pytest.mark.parametrize("where", ["accompany", "quantize"])
async def test_without_a_companion_the_run_goes_on(monkeypatch, where):
    generators, fleet = Generators(), FakeFleet("int8_static", LAYERS)
    ptq = await launch(generators, fleet, ab__enabled=True)
    if where == "accompany":
        generators.replicas[0].faults["accompany"] = RuntimeError("out of memory")
    else:
        real = fleet._quantize

        async def quantize(version: int, scheme: str | None = None, *rest: Any) -> ArtifactRef:
            if scheme == "bf16":
                raise FleetError("part-0 no replica took it")
            return await real(version, scheme, *rest)

        monkeypatch.setattr(fleet, "_quantize", quantize)
    verdict = await ptq.publish(1)
    assert verdict.outcome == "accepted"
    assert await ptq.accompanied() is None
    assert generators.replicas[0].companion is None
    await agree(generators, ptq)


@pytest.mark.parametrize(
    ("live", "drawn", "fails"), [(0.2, True, True), (0.2, False, False), (0.98, True, False)]
)
async def test_rewards_that_disagree_take_it_back(metrics, live, drawn, fails):
    generators = Generators()
    ptq = await launch(
        generators, FakeFleet("int8_static", LAYERS), ab__enabled=True, ab__min_prompts=8
    )
    await ptq.publish(1)
    await ptq.accompanied()
    for number in range(10):
        noise = 0.01 * (number % 3)
        await ptq.offer([arm(ptq, "live", live + noise, number, drawn)] * 2)
        await ptq.offer([arm(ptq, "companion", 1.0 + noise, number, drawn)] * 2)
    rollback = await ptq.watch(2, [], 0)
    assert (rollback is not None) == fails
    if rollback is not None:
        assert "reward agreement 20" in rollback.reason
        assert (rollback.version_to, rollback.exact) == (1, False)
        assert rollback.transitions[0].numbers["agreement"] == pytest.approx(0.2, abs=0.02)
        assert (await ptq.publish(2)).level == 1
    if drawn:
        assert any(name == "ptq/ab/agreement" for name, _ in metrics)
    await agree(generators, ptq)


@pytest.mark.parametrize("where", ["quantize", "accompany"])
async def test_publish_returns_before_the_companion_is_made(monkeypatch, where):
    """It is made meanwhile, and the next publish stages nothing before it is done."""
    generators, fleet = Generators(), FakeFleet("int8_static", LAYERS)
    ptq = await launch(generators, fleet, ab__enabled=True)
    go, there, replica = asyncio.Event(), asyncio.Event(), generators.replicas[0]
    owner, name = (fleet, "_quantize") if where == "quantize" else (replica, "accompany")
    real = getattr(owner, name)

    async def held_up(*args: Any) -> Any:
        if where == "accompany" or args[1:2] == ("bf16",):
            there.set()
            await go.wait()
        return await real(*args)

    monkeypatch.setattr(owner, name, held_up)
    assert (await asyncio.wait_for(ptq.publish(1), 5)).outcome == "accepted"
    await asyncio.wait_for(there.wait(), 5)
    second = asyncio.create_task(ptq.publish(2))
    await asyncio.sleep(0.02)
    assert replica.companion is None
    assert (second.done(), replica.calls.count("stage")) == (False, 1)
    go.set()
    assert (await asyncio.wait_for(second, 5)).outcome == "accepted"
    companion = await asyncio.wait_for(ptq.accompanied(), 5)
    assert companion is not None
    assert (companion.policy_version, replica.companion) == (2, companion.artifact_id)


async def test_two_publishes_in_a_row_make_one_companion_of_the_last():
    generators, fleet = Generators(), FakeFleet("int8_static", LAYERS)
    ptq = await launch(generators, fleet, ab__enabled=True)
    await asyncio.gather(ptq.publish(1), ptq.publish(2))
    companion = await ptq.accompanied()
    assert companion is not None
    assert companion.policy_version == 2
    assert generators.replicas[0].calls.count("accompany") == 1


async def test_a_publish_that_is_cancelled_gives_the_companion_its_place_back():
    generators = Generators()
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS), ab__enabled=True)
    await ptq.publish(1)
    beside = await ptq.accompanied()
    assert beside is not None
    task, _ = await held(ptq, generators.replicas[0], "probe", 2)
    assert generators.replicas[0].companion is None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.wait_for(ptq.accompanied(), 5) == beside
    assert generators.replicas[0].companion == beside.artifact_id


async def test_closing_ends_a_companion_that_hangs(caplog):
    fleet = FakeFleet("int8_static", LAYERS)
    generators = Generators()
    ptq = await launch(generators, fleet, ab__enabled=True)
    there, ended = asyncio.Event(), asyncio.Event()

    async def never(*_: Any) -> None:
        there.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    generators.replicas[0].accompany = never  # type: ignore[method-assign, assignment]
    await ptq.publish(1)
    await asyncio.wait_for(there.wait(), 5)
    await asyncio.wait_for(ptq.close(), 5)
    assert ended.is_set()
    assert "still" not in caplog.text


async def test_what_making_a_companion_raises_is_logged(monkeypatch, caplog):
    generators = Generators()
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS), ab__enabled=True)

    async def broken(fleet: Any, replica: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(ptq.serving, "accompany", broken)
    await ptq.publish(1)
    await ptq.accompanied()
    assert "a bug" in caplog.text
    assert (await ptq.publish(2)).outcome == "accepted"


async def offered(ptq: Any, numbers: range, live: float = 0.2, **metadata: Any) -> None:
    """Prompts of both arms, two samples each; the metadata is of one sample in the live arm."""
    for number in numbers:
        noise = 0.01 * (number % 3)
        poor = arm(ptq, "live", live + noise, number)
        odd = arm(ptq, "live", metadata.pop("reward", live + noise), number, **metadata)
        await ptq.offer([poor, odd])
        await ptq.offer([arm(ptq, "companion", 1.0 + noise, number)] * 2)


@pytest.mark.parametrize(
    "odd",
    [
        {"resubmitted": 1},
        {"drawn": False, "resubmitted": 1},
        {"drawn": False},
        {"arm": "companion"},
        {"artifact_id": "of another plan"},
        {"reward": None},
    ],
    ids=str,
)
async def test_a_prompt_with_one_sample_that_does_not_count_counts_not_at_all(odd):
    """What is left of it are the short samples, say: no fair sample of the prompt."""
    ptq = await launch(
        Generators(), FakeFleet("int8_static", LAYERS), ab__enabled=True, ab__min_prompts=4
    )
    await ptq.publish(1)
    await ptq.accompanied()
    for number in range(10):
        await offered(ptq, range(number, number + 1), **odd)
    assert await ptq.watch(2, [], 0) is None
    await offered(ptq, range(10, 20))
    assert await ptq.watch(3, [], 0) is not None


async def test_after_rewards_disagree_only_another_plan_is_gone_back_to():
    """What is confirmed, is so by the mismatch, which says nothing of rewards."""
    generators, fleet = Generators(), FakeFleet("int8_static", LAYERS)
    ptq = await launch(generators, fleet, ab__enabled=True, ab__min_prompts=4)
    same = await ptq.publish(1)
    await ptq.watch(1, records(same), 0)
    fleet.scheme = "int8_dynamic"
    other = await ptq.publish(2)
    await ptq.watch(2, records(other), 0)
    fleet.scheme = "int8_static"
    await ptq.publish(3)
    await ptq.accompanied()
    assert [s.confirmed for s in ptq.serving.history] == [True, True, False]
    await offered(ptq, range(10))
    rollback = await ptq.watch(4, [], oldest_usable=0)
    assert rollback is not None
    assert (rollback.artifact_to, rollback.exact) == (other.artifact_id, True)
    assert set(ptq.ladder.banned) == {same.artifact_id, rollback.artifact_from}
    await agree(generators, ptq)


async def test_with_no_other_plan_to_go_back_to_it_serves_in_bf16():
    generators = Generators()
    ptq = await launch(
        generators, FakeFleet("int8_static", LAYERS), ab__enabled=True, ab__min_prompts=4
    )
    same = await ptq.publish(1)
    await ptq.watch(1, records(same), 0)
    await ptq.publish(2)
    await ptq.accompanied()
    await offered(ptq, range(10))
    rollback = await ptq.watch(3, [], oldest_usable=0)
    assert rollback is not None
    assert (rollback.version_to, rollback.exact) == (2, False)
    assert same.artifact_id not in await store.artifact_ids(), "it is not kept for nothing"
    await agree(generators, ptq)
