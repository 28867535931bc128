"""Commits, and what stays in the store for going back; over doubles."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from forge_ptq import store
from forge_ptq.services.fleet import FleetError
from tests.integration.publish_doubles import FakeFleet, Generators
from tests.unit.guard.support import LAYERS, agree, launch, records


@pytest.mark.parametrize("name", ["describe", "commit"])
async def test_a_publish_cancelled_in_its_commit_ends_the_commit_first(name):
    generators = Generators(2)
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS))
    first = await ptq.publish(1)
    replica = generators.replicas[1]
    real, go, there = getattr(replica, name), asyncio.Event(), asyncio.Event()

    async def waiting(*args: Any) -> Any:
        if ptq.serving.policy.live[0] != first.artifact_id:  # the other one has flipped
            there.set()
            await go.wait()
        return await real(*args)

    setattr(replica, name, waiting)
    task = asyncio.create_task(ptq.publish(2))
    await asyncio.wait_for(there.wait(), 10)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    task.cancel()  # more than once, too
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    verdict, second = ptq.verdicts[-1], ptq.serving.current
    assert (ptq.served_version, verdict.outcome) == (2, "accepted")
    await agree(generators, ptq)
    setattr(replica, name, real)
    assert second is not None
    assert (verdict.artifact_id, verdict.scheme) == (second.ref.artifact_id, first.scheme)
    assert verdict.perplexity_rise == pytest.approx(first.perplexity_rise)
    assert verdict.reason == first.reason
    assert verdict.flip_s is not None
    await ptq.watch(3, records(second.ref), oldest_usable=0)
    assert second.confirmed, "live traffic judges it"


async def test_a_replica_that_comes_back_right_after_the_commit_with_the_old_one_conforms():
    generators = Generators(2)
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS))
    await ptq.publish(1)
    flipping, late = generators.replicas
    real = flipping.commit

    async def commit(artifact_id: str) -> Any:
        report = await real(artifact_id)
        late.away, late.idle = False, None  # it had read the pointer before that moved
        return report

    flipping.commit = commit  # type: ignore[method-assign]
    probe = flipping.probe

    async def probing(sequences: list[Any]) -> Any:
        late.away = True
        return await probe(sequences)

    flipping.probe = probing  # type: ignore[method-assign]
    verdict = await ptq.publish(2)
    assert verdict.outcome == "accepted"
    assert (late.calls.count("commit"), late.calls.count("conform")) == (1, 1)
    await agree(generators, ptq)


async def test_one_that_comes_back_later_conforms_before_the_next_publish():
    generators = Generators(2)
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS), guard__on_reject=["keep"])
    await ptq.publish(1)
    late = generators.replicas[1]
    probe = generators.replicas[0].probe

    async def probing(sequences: list[Any]) -> Any:
        late.away, late.idle = True, None
        return await probe(sequences)

    generators.replicas[0].probe = probing  # type: ignore[method-assign]
    second = await ptq.publish(2)
    assert generators.live != [second.artifact_id] * 2
    generators.replicas[0].probe = probe  # type: ignore[method-assign]
    late.away = False
    generators.replicas[0].kl = 0.5
    assert (await ptq.publish(3)).outcome == "kept"
    await agree(generators, ptq)


async def test_a_pointer_that_could_not_be_moved_back_is_before_the_next_publish(memory):
    generators = Generators(2)
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS), guard__on_reject=["keep"])
    first = await ptq.publish(1)
    assert ptq.serving.current is not None
    other = await ptq.fleet.quantize(2)
    memory.committed = other
    await generators.replicas[1].conform()  # it came back with it
    generators.replicas[0].kl = 0.5
    assert (await ptq.publish(3)).outcome == "kept"
    assert generators.live == [first.artifact_id] * 2
    await agree(generators, ptq)


@pytest.mark.parametrize("moves", [True, False])
async def test_healthy_replicas_keep_what_served_when_nobody_flips_and_one_is_missing(
    memory, caplog, moves
):
    generators = Generators(2)
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS), guard__on_reject=["keep"])
    first = await ptq.publish(1)
    staying, late = generators.replicas

    def commit() -> Exception:
        late.away = True
        if not moves:
            memory.failing.add("set_committed")  # when the pointer is to be moved back
        return RuntimeError("boom")

    staying.faults["commit"], late.faults["commit"] = commit, "die early"
    if moves:
        real = generators.conform.fanout  # type: ignore[attr-defined]

        async def fails(*args: Any) -> Any:
            await real(*args)
            raise RuntimeError("a replica ended itself")

        generators.conform.fanout = fails  # type: ignore[attr-defined]
    assert (await ptq.publish(2)).outcome == "kept"
    assert staying.live == first.artifact_id
    assert staying.calls.count("conform") == int(moves)
    assert (f"stay behind {first.artifact_id}" in caplog.text) == moves
    late.away = False
    memory.failing.clear()
    generators.conform = generators._endpoint("conform")  # type: ignore[attr-defined]
    staying.kl = 0.5
    assert (await ptq.publish(3)).outcome == "kept"
    await agree(generators, ptq)


async def test_what_the_store_has_dropped_is_nothing_to_go_back_to_when_confirmed_late(memory):
    generators = Generators()
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS), offered=400)
    good = await ptq.publish(1)
    await ptq.watch(1, records(good), oldest_usable=0)
    verdicts = [await ptq.publish(version) for version in range(2, 9)]
    assert verdicts[0].artifact_id not in memory.artifacts
    await ptq.watch(8, records(verdicts[0]), oldest_usable=0)
    late = ptq.serving.find(verdicts[0].artifact_id or "")
    assert late is not None
    assert late.confirmed
    bad = await ptq.publish(9)
    assert good.artifact_id in memory.artifacts
    rollback = await ptq.watch(10, records(bad, k3=0.5), oldest_usable=0)
    assert rollback is not None
    assert (rollback.exact, rollback.artifact_to) == (True, good.artifact_id)
    await agree(generators, ptq)


async def test_weights_of_what_serves_and_of_what_would_be_gone_back_to_stay(memory):
    generators = Generators()
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS))
    for version in range(1, 6):
        memory.put_weights(version, {})
        verdict = await ptq.publish(version)
        if version == 1:
            await ptq.watch(1, records(verdict), oldest_usable=0)
    assert await store.weight_versions() == [1, 4, 5]
    rollback = await ptq.watch(6, records(verdict, k3=0.5), oldest_usable=0)
    assert rollback is not None
    assert rollback.version_to == 1
    assert 1 in await store.weight_versions()


async def test_after_something_guilty_that_could_not_be_taken_back_the_next_version_serves():
    generators, fleet = Generators(), FakeFleet("int8_static", LAYERS)
    ptq = await launch(generators, fleet)
    bad = await ptq.publish(1)
    fleet.faults["quantize"] = FleetError("get_weights 1: not in the store")
    assert await ptq.watch(2, records(bad, k3=0.5), oldest_usable=0) is None
    fleet.faults.clear()
    ptq.cfg.probe.min_sequences = 1000
    verdict = await ptq.publish(2)
    assert (verdict.outcome, verdict.scheme) == ("fell_back", "bf16:4")
    assert "not enough probe rollouts" in verdict.reason
    await agree(generators, ptq)


async def test_a_pointer_that_names_something_else_is_set_though_all_replicas_agree(memory):
    generators = Generators(2)
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS), guard__on_reject=["keep"])
    first = await ptq.publish(1)

    def fail() -> RuntimeError:
        memory.failing.add("set_committed")  # when the pointer is to be moved back
        return RuntimeError("boom")

    for replica in generators.replicas:
        replica.faults["commit"] = fail
    assert (await ptq.publish(2)).outcome == "kept"
    assert memory.committed.artifact_id != first.artifact_id
    memory.failing.clear()
    generators.replicas[0].kl = 0.5
    assert (await ptq.publish(3)).outcome == "kept"
    await agree(generators, ptq)
