"""Generator replicas that come back; over doubles."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from forge_ptq.services.ptq import PTQ
from tests.integration.publish_doubles import FakeFleet, Generators
from tests.unit.guard.support import LAYERS, agree, held, held_up, launch


def respawning(generators: Generators, callbacks: list[Any]) -> Any:
    """Makes it a service that can say that a replica has come back, as an actor by itself."""
    generators.session, generators.on_respawn = None, callbacks.append  # type: ignore[attr-defined]

    async def come_back(number: int, pointer: Any) -> None:
        """pointer: what it had read in the store when it was started."""
        replica = generators.replicas[number]
        replica.live, replica.idle, replica.companion = pointer.artifact_id, None, None
        names = ("conform", "accompany")

        def endpoint(name: str) -> Any:
            async def call_one(*args: Any) -> Any:
                return await replica.call(name, *args)

            return SimpleNamespace(call_one=call_one)

        actor = SimpleNamespace(**{name: endpoint(name) for name in names})
        for callback in callbacks:
            await callback(number, actor)

    return come_back


async def serving_with_companion(replicas: int) -> tuple[Generators, Any, PTQ, Any, Any]:
    """(generators, come_back, publisher, companion, reference of what serves) after a publish."""
    generators, callbacks = Generators(replicas), []  # type: ignore[var-annotated]
    come_back = respawning(generators, callbacks)
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS), ab__enabled=True)
    await ptq.publish(1)
    beside, current = await ptq.accompanied(), ptq.serving.current
    assert beside is not None
    assert current is not None
    return generators, come_back, ptq, beside, current.ref


async def test_a_replica_that_comes_back_serves_what_is_committed_now_and_its_companion():
    generators, callbacks = Generators(2), []  # type: ignore[var-annotated]
    come_back = respawning(generators, callbacks)
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS), ab__enabled=True)
    await ptq.publish(1)
    old = ptq.serving.current
    await ptq.publish(2)
    beside = await ptq.accompanied()
    assert old is not None
    assert beside is not None
    calls = len(generators.replicas[0].calls)
    await come_back(1, old.ref)
    await agree(generators, ptq)
    assert await ptq.accompanied() == beside
    assert generators.replicas[1].companion == beside.artifact_id
    assert len(generators.replicas[0].calls) == calls, "the others go on with theirs"
    await ptq.publish(3)
    await ptq.accompanied()
    await agree(generators, ptq)


async def test_coming_back_waits_for_no_publish_and_gets_no_companion_of_a_closed_publisher():
    generators, come_back, ptq, beside, current = await serving_with_companion(2)
    async with ptq._lock:
        await asyncio.wait_for(come_back(1, current), 5)
        assert generators.replicas[1].companion is None
    assert await ptq.accompanied() == beside
    assert generators.replicas[1].companion == beside.artifact_id
    await ptq.close()
    await come_back(1, current)
    assert generators.replicas[1].companion is None


async def test_one_that_comes_back_during_a_publish_costs_the_others_no_companion():
    generators, come_back, ptq, _, current = await serving_with_companion(2)
    task, go = await held(ptq, generators.replicas[0], "probe", 2)
    await come_back(1, current)
    go.set()
    await asyncio.wait_for(task, 10)
    beside = await ptq.accompanied()
    assert beside is not None
    assert beside.policy_version == 2
    assert [r.companion for r in generators.replicas] == [beside.artifact_id] * 2
    await agree(generators, ptq)


@pytest.mark.parametrize("fault", ["die", RuntimeError("out of memory")])
async def test_a_companion_that_was_too_much_for_a_replica_is_not_given_to_it_again(fault):
    """It would kill it for ever: every respawn by itself goes well."""
    generators, callbacks = Generators(2), []  # type: ignore[var-annotated]
    come_back = respawning(generators, callbacks)
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS), ab__enabled=True)
    replica = generators.replicas[1]
    replica.faults["accompany"] = fault
    await ptq.publish(1)
    await ptq.accompanied()
    current = ptq.serving.current
    assert current is not None
    await come_back(1, current.ref)
    await ptq.accompanied()
    assert replica.calls.count("accompany") == 1
    generators.replicas[0].kl, ptq.cfg.guard.on_reject = 0.5, ["keep"]
    assert (await ptq.publish(2)).outcome == "kept"
    assert await ptq.accompanied() is None
    assert replica.calls.count("accompany") == 1, "nor with the others"
    generators.replicas[0].kl = 0.01
    replica.faults.clear()
    await ptq.publish(3)
    beside = await ptq.accompanied()
    assert beside is not None
    assert replica.companion == beside.artifact_id, "the next version's is tried again"


async def test_a_replica_that_cannot_conform_is_not_taken_back_into_service():
    generators, callbacks = Generators(2), []  # type: ignore[var-annotated]
    come_back = respawning(generators, callbacks)
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS))
    await ptq.publish(1)
    assert ptq.serving.current is not None
    generators.replicas[1].conform = broken = AsyncMock(side_effect=RuntimeError("gone"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="gone"):
        await come_back(1, ptq.serving.current.ref)
    broken.assert_awaited_once()


async def test_one_that_came_back_with_what_the_others_would_not_flip_to_goes_back_with_them(
    memory,
):
    generators = Generators(2)
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS), guard__on_reject=["keep"])
    await ptq.publish(1)
    staying, late = generators.replicas
    describe = staying.describe

    def commit() -> Exception:
        late.away = True
        return RuntimeError("boom")

    async def described() -> Any:
        """It is back right after the others were asked; the pointer has not moved back yet."""
        if late.away:
            late.away, late.live, late.idle = False, memory.committed.artifact_id, None
        return await describe()

    staying.faults["commit"], staying.describe = commit, described  # type: ignore[method-assign]
    late.faults["commit"] = "die early"
    verdict = await ptq.publish(2)
    assert verdict.outcome == "kept"
    assert "no generator replica would flip" in verdict.reason
    await agree(generators, ptq)


async def test_one_that_comes_back_while_another_gets_its_companion_gets_one_too():
    generators, come_back, ptq, beside, current = await serving_with_companion(3)
    there, go = held_up(generators.replicas[0], "accompany")
    await come_back(0, current)
    await asyncio.wait_for(there.wait(), 5)
    await come_back(1, current)
    await come_back(2, current)
    settled = asyncio.create_task(ptq.accompanied())
    await asyncio.sleep(0.01)
    assert not settled.done()
    go.set()
    assert await asyncio.wait_for(settled, 5) == beside
    assert [r.companion for r in generators.replicas] == [beside.artifact_id] * 3


async def test_closing_ends_the_companion_that_hangs_and_the_one_that_waits_for_it(caplog):
    generators, come_back, ptq, _, current = await serving_with_companion(2)
    there, _ = held_up(generators.replicas[0], "accompany")
    await come_back(0, current)
    await asyncio.wait_for(there.wait(), 5)
    await come_back(1, current)
    await asyncio.wait_for(ptq.close(), 5)
    assert await asyncio.wait_for(ptq.accompanied(), 5) is None
    assert [r.companion for r in generators.replicas] == [None, None]
    assert not ptq._lock.locked()
    assert "still" not in caplog.text
