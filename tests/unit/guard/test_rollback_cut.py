"""Rollbacks that are cancelled, and those that have to try something else; over doubles."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.integration.publish_doubles import FakeFleet, Generators
from tests.unit.guard.support import LAYERS, agree, launch, records


@pytest.mark.parametrize(
    ("exact", "name", "moved"),
    [
        (True, "describe", False),
        (True, "conform", True),
        (False, "stage", False),
        (False, "commit", True),
    ],
)
async def test_a_rollback_that_is_cancelled_leaves_all_of_one_mind(exact, name, moved):
    """Once the pointer has moved it goes on to its end, else nothing has moved."""
    generators = Generators(2)
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS))
    good = await ptq.publish(1)
    if exact:
        await ptq.watch(2, records(good), oldest_usable=0)
    bad = await ptq.publish(2)
    replica = generators.replicas[1]
    real, go, there = getattr(replica, name), asyncio.Event(), asyncio.Event()

    async def waiting(*args: Any) -> Any:
        there.set()
        await go.wait()
        return await real(*args)

    setattr(replica, name, waiting)
    task = asyncio.create_task(ptq.watch(3, records(bad, k3=0.5), oldest_usable=1))
    await asyncio.wait_for(there.wait(), 10)
    task.cancel()
    await asyncio.sleep(0.01)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    await agree(generators, ptq)
    assert ptq.serving.current is not None
    assert (ptq.serving.current.ref.artifact_id != bad.artifact_id) == moved
    setattr(replica, name, real)
    again = await ptq.watch(4, [], oldest_usable=1)
    assert (again is None) == moved
    await agree(generators, ptq)
    assert (await ptq.publish(3)).outcome == "demoted"


async def test_what_could_not_be_staged_in_time_does_not_keep_the_slots_from_bf16():
    """A replica that still stages it refuses whatever else is to be staged."""
    generators = Generators(2)
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS), deadlines__stage_s=0.1)
    good = await ptq.publish(1)
    await ptq.watch(2, records(good), oldest_usable=0)
    bad = await ptq.publish(2)
    replica = generators.replicas[1]
    staging: list[Any] = []
    replica.idle, real = None, replica.stage  # it was respawned since

    async def stage(ref: Any) -> Any:
        if staging:
            raise RuntimeError("another artifact is being staged; discard it or wait")
        if ref.artifact_id == good.artifact_id:
            staging.append(ref)
            await asyncio.sleep(60)
        return await real(ref)

    async def discard() -> bool:
        staging.clear()
        replica.idle = None
        return True

    replica.stage, replica.discard = stage, discard  # type: ignore[method-assign]
    rollback = await ptq.watch(3, records(bad, k3=0.5), oldest_usable=1)
    assert rollback is not None
    assert (rollback.version_to, rollback.exact) == (2, False)
    await agree(generators, ptq)
