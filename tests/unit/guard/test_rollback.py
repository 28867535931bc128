"""Probation and rollback, also while a publish is under way; over doubles."""

from __future__ import annotations

import asyncio
import json

import pytest

from forge_ptq import store
from forge_ptq.services.fleet import FleetError
from tests.integration.publish_doubles import FakeFleet, Generators
from tests.unit.guard.support import (
    LAYERS,
    agree,
    held,
    launch,
    path,
    records,
)


async def test_what_live_traffic_confirms_is_gone_back_to_exactly(metrics):
    generators, fleet = Generators(2), FakeFleet("int8_static", LAYERS)
    ptq = await launch(generators, fleet)
    good = await ptq.publish(1)
    assert good.artifact_id is not None
    assert await ptq.watch(2, records(good), oldest_usable=0) is None
    assert ptq.serving.current is not None
    assert ptq.serving.current.confirmed
    bad = await ptq.publish(2)
    assert path(bad.transitions)[0] == "confirmed", "told with the next verdict"
    rollback = await ptq.watch(3, records(bad, k3=0.5), oldest_usable=1)
    assert rollback is not None
    assert (rollback.version_from, rollback.version_to) == (2, 1)
    assert (rollback.artifact_from, rollback.artifact_to) == (bad.artifact_id, good.artifact_id)
    assert (rollback.exact, rollback.behind) == (True, 0)
    assert "mismatch 0.5 nats per token" in rollback.reason
    assert path(rollback.transitions) == ["condemned", "rolled_back"]
    assert rollback.transitions[0].numbers["mismatch_k3"] == pytest.approx(0.5)
    assert [r.calls.count("stage") for r in generators.replicas] == [2, 2], "it was still there"
    assert (ptq.served_version, ptq.rollbacks[-1]) == (1, rollback)
    await agree(generators, ptq)
    assert bad.artifact_id not in await store.artifact_ids()
    assert ("ptq/guard/rollbacks", 1.0) in metrics
    assert ("ptq/probation/mismatch_k3", pytest.approx(0.5)) in metrics
    json.dumps(rollback.to_dict(), allow_nan=False)
    again = await ptq.publish(2)  # never unchanged
    assert (again.outcome, again.demotions, again.level) == ("demoted", 1, 1)
    assert again.artifact_id != bad.artifact_id
    assert path(again.transitions)[:2] == ["demote", "prepare"]
    await agree(generators, ptq)


async def test_it_is_staged_again_where_the_idle_slot_holds_something_else():
    generators = Generators(2)
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS))
    good = await ptq.publish(1)
    await ptq.watch(2, records(good), oldest_usable=0)
    bad = await ptq.publish(2)
    generators.replicas[1].idle = None  # it was respawned since
    rollback = await ptq.watch(3, records(bad, k3=0.5), oldest_usable=1)
    assert rollback is not None
    assert rollback.exact
    await agree(generators, ptq)


@pytest.mark.parametrize("why", ["too old", "not in the store", "nothing confirmed", "banned"])
async def test_without_a_way_back_the_serving_version_goes_to_bf16(memory, why):
    generators = Generators(2)
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS))
    good = await ptq.publish(1)
    if why != "nothing confirmed":
        await ptq.watch(2, records(good), oldest_usable=0)
    bad = await ptq.publish(2)
    if why == "not in the store":
        del memory.artifacts[good.artifact_id]
    if why == "banned":
        assert good.artifact_id is not None
        ptq.ladder.banned[good.artifact_id] = 1
    oldest = 2 if why == "too old" else 1
    rollback = await ptq.watch(3, records(bad, k3=0.5), oldest_usable=oldest)
    assert rollback is not None
    assert (rollback.version_from, rollback.version_to, rollback.exact) == (2, 2, False)
    await agree(generators, ptq)
    assert set(generators.replicas[0].live_layers.values()) == {"bf16"}
    assert (await ptq.publish(3)).outcome == "demoted"


async def test_episodes_of_the_version_before_condemn_the_plan_they_share():
    generators = Generators()
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS))
    first, second = await ptq.publish(1), await ptq.publish(2)
    rollback = await ptq.watch(3, records(first, k3=0.5), oldest_usable=1)
    assert rollback is not None
    assert (rollback.artifact_from, rollback.version_to) == (second.artifact_id, 2)
    assert set(ptq.ladder.banned) == {first.artifact_id, second.artifact_id}
    await agree(generators, ptq)


async def test_what_the_guilty_one_sampled_does_not_count_after_it_was_taken_back():
    generators = Generators()
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS))
    good = await ptq.publish(1)
    await ptq.watch(2, records(good), oldest_usable=0)
    bad = await ptq.publish(2)
    assert await ptq.watch(3, records(bad, k3=0.5), oldest_usable=1) is not None
    for step in range(4, 8):  # the buffer still holds its episodes
        assert await ptq.watch(step, records(bad, k3=0.5), oldest_usable=1) is None
    assert ptq.ladder.owed == 1
    assert ptq.served_version == 1


async def test_what_its_own_traffic_confirmed_stays_when_others_of_its_plan_fail():
    generators = Generators()
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS))
    damaged, good = await ptq.publish(1), await ptq.publish(2)
    await ptq.watch(3, records(good), oldest_usable=1)
    assert await ptq.watch(3, records(damaged, k3=0.5), oldest_usable=1) is None
    assert set(ptq.ladder.banned) == {damaged.artifact_id}
    assert (ptq.served_version, ptq.ladder.owed) == (2, 1)
    rollback = await ptq.watch(4, records(good, k3=0.5), oldest_usable=1)
    assert rollback is not None, "but not of what it does itself"
    assert rollback.artifact_from == good.artifact_id


async def test_a_plan_that_does_not_serve_any_more_is_demoted_next_time_and_nothing_moves():
    generators, fleet = Generators(), FakeFleet("int8_static", LAYERS)
    ptq = await launch(
        generators, fleet, guard__on_reject=["demote", "bf16"], guard__demote_attempts=1
    )
    first = await ptq.publish(1)
    fleet.faults["rank"] = FleetError("nobody")
    generators.replicas[0].kl = 0.2
    assert (await ptq.publish(2)).outcome == "fell_back"
    before = list(generators.live)
    assert await ptq.watch(3, records(first, k3=0.5), oldest_usable=1) is None
    assert generators.live == before
    assert ptq.ladder.owed == 1
    assert (await ptq.publish(3)).outcome == "fell_back", "nothing can be ranked"
    assert ptq.ladder.owed == 1
    fleet.faults.clear()
    generators.replicas[0].kl = 0.01
    verdict = await ptq.publish(4)
    assert (verdict.outcome, verdict.level) == ("demoted", 1)


async def test_other_plans_and_strangers_change_nothing():
    generators, fleet = Generators(), FakeFleet("int8_static", LAYERS)
    ptq = await launch(generators, fleet)
    old = await ptq.publish(1)
    fleet.scheme = "int8_dynamic"
    await ptq.publish(2)
    assert await ptq.watch(3, records(old, k3=0.5) + records("stray", k3=9.0), 1) is None
    assert (ptq.ladder.owed, ptq.ladder.banned) == (0, {})


async def test_probation_off_measures_and_takes_nothing_back(metrics):
    ptq = await launch(
        Generators(), FakeFleet("int8_static", LAYERS), guard__probation__enabled=False
    )
    verdict = await ptq.publish(1)
    assert await ptq.watch(2, records(verdict, k3=0.5), 0) is None
    assert ("ptq/probation/alarms", 1.0) in metrics
    assert ptq.ladder.owed == 0


@pytest.mark.parametrize("rungs", [["keep"], ["bf16", "keep"], []])
async def test_without_demote_the_whole_model_goes_to_bf16_and_recovers(rungs):
    generators = Generators()
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS), guard__on_reject=rungs)
    verdict = await ptq.publish(1)
    assert await ptq.watch(2, records(verdict, k3=0.5), 1) is not None
    outcomes = [(await ptq.publish(version)).outcome for version in range(2, 8)]
    assert outcomes == ["fell_back"] * 4 + ["accepted"] * 2
    await agree(generators, ptq)
    # In vain: the step on trial comes back for twice as long.
    assert await ptq.watch(8, records(ptq.verdicts[-1], k3=0.5), 1) is not None
    outcomes = [(await ptq.publish(version)).outcome for version in range(8, 16)]
    assert outcomes == ["fell_back"] * 7 + ["accepted"]


@pytest.mark.parametrize("endpoint", ["describe", "stage", "commit"])
async def test_a_rollback_that_fails_is_tried_again(endpoint):
    generators = Generators(2)
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS))
    bad = await ptq.publish(1)
    for replica in generators.replicas:
        replica.faults[endpoint] = RuntimeError("boom")
    assert await ptq.watch(2, records(bad, k3=0.5), 0) is None
    assert generators.live == [bad.artifact_id] * 2
    for replica in generators.replicas:
        replica.faults.clear()
    rollback = await ptq.watch(3, [], 0)
    assert rollback is not None
    assert rollback.version_to == 1
    assert "mismatch 0.5" in rollback.reason
    await agree(generators, ptq)
    assert await ptq.watch(4, [], 0) is None


async def test_a_pointer_that_does_not_move_leaves_all_as_it_was(memory):
    generators = Generators()
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS))
    good = await ptq.publish(1)
    await ptq.watch(2, records(good), oldest_usable=0)
    bad = await ptq.publish(2)
    memory.failing.add("set_committed")
    assert await ptq.watch(3, records(bad, k3=0.5), oldest_usable=1) is None
    assert generators.live == [bad.artifact_id]
    memory.failing.clear()
    assert await ptq.watch(4, [], oldest_usable=1) is not None
    await agree(generators, ptq)


async def test_a_replica_that_does_not_conform_is_counted():
    generators = Generators(2)
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS))
    good = await ptq.publish(1)
    await ptq.watch(2, records(good), oldest_usable=0)
    bad = await ptq.publish(2)
    generators.replicas[1].faults["conform"] = "die early"  # and is not up yet
    rollback = await ptq.watch(3, records(bad, k3=0.5), oldest_usable=1)
    assert rollback is not None
    assert (rollback.exact, rollback.behind) == (True, 1)
    assert "1 replicas are behind" in str(rollback)
    assert generators.replicas[0].live == good.artifact_id


async def test_a_replica_that_dies_before_the_pointer_moves_is_no_harm():
    generators = Generators(2)
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS))
    bad = await ptq.publish(1)
    generators.replicas[1].faults["stage"] = "die"
    assert await ptq.watch(2, records(bad, k3=0.5), 0) is None
    generators.replicas[1].faults.clear()
    assert await ptq.watch(3, [], 0) is not None
    await agree(generators, ptq)


@pytest.mark.parametrize("name", ["stage", "probe"])
async def test_a_candidate_of_the_guilty_plan_is_not_served_any_more(name):
    generators = Generators()
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS))
    bad = await ptq.publish(1)
    task, go = await held(ptq, generators.replicas[0], name, 2)
    watching = asyncio.create_task(ptq.watch(2, records(bad, k3=0.5), 0))
    await asyncio.sleep(0.01)
    assert not watching.done()
    go.set()
    verdict = await asyncio.wait_for(task, 10)
    assert (verdict.outcome, verdict.demotions) == ("demoted", 1)
    assert "its plan failed its probation while it was made" in verdict.reason
    assert await asyncio.wait_for(watching, 10) is None, "what was guilty does not serve any more"
    assert ptq.ladder.owed == 0
    await agree(generators, ptq)


async def test_condemned_between_the_check_and_the_flip_it_is_taken_back_at_once():
    generators = Generators()
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS))
    bad = await ptq.publish(1)
    task, go = await held(ptq, generators.replicas[0], "commit", 2)
    watching = asyncio.create_task(ptq.watch(2, records(bad, k3=0.5), 0))
    await asyncio.sleep(0.01)
    go.set()
    verdict = await asyncio.wait_for(task, 10)
    rollback = await asyncio.wait_for(watching, 10)
    assert verdict.outcome == "accepted"
    assert rollback is not None
    assert rollback.artifact_from == verdict.artifact_id
    await agree(generators, ptq)


async def test_watch_returns_at_once_while_all_is_well():
    generators = Generators()
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS))
    good = await ptq.publish(1)
    task, go = await held(ptq, generators.replicas[0], "probe", 2)
    assert await asyncio.wait_for(ptq.watch(2, records(good), 0), 1) is None
    go.set()
    assert (await asyncio.wait_for(task, 10)).outcome == "accepted"


async def test_closed_or_off_it_watches_nothing():
    ptq = await launch(Generators(), FakeFleet("int8_static", LAYERS))
    verdict = await ptq.publish(1)
    await ptq.close()
    assert await ptq.watch(2, records(verdict, k3=0.5), 0) is None
    off = await launch(Generators(), FakeFleet("int8_static", LAYERS), enabled=False)
    assert await off.watch(2, records(verdict, k3=0.5), 0) is None
