"""What a new publisher remembers, and random walks over everything; over doubles."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from forge_ptq import store
from forge_ptq.services.passage import State
from tests.integration.publish_doubles import FakeFleet, Generators
from tests.unit.guard.support import (
    LAYERS,
    agree,
    bad_below,
    launch,
    records,
)


async def test_a_new_publisher_remembers_everything(memory):
    generators, fleet = Generators(), FakeFleet("int8_static", LAYERS)
    generators.replicas[0].kl = bad_below(1)
    ptq = await launch(generators, fleet)
    good = await ptq.publish(1)
    await ptq.watch(2, records(good), 0)
    bad = await ptq.publish(2)
    await ptq.watch(3, records(bad, k3=0.5, count=3), 1)  # one more is to come
    state = json.loads(json.dumps(ptq.state(), allow_nan=False))
    other = await launch(generators, fleet, state=state)
    assert other.served_version == 2
    assert other.ladder.steps == ptq.ladder.steps
    rollback = await other.watch(3, records(bad, k3=0.5, count=1), 1)
    assert rollback is not None
    assert rollback.artifact_to == good.artifact_id
    state = json.loads(json.dumps(other.state(), allow_nan=False))
    third = await launch(generators, fleet, state=state)
    assert (third.ladder.owed, third.served_version) == (1, 1)
    assert bad.artifact_id in third.ladder.banned
    verdict = await third.publish(3)
    assert (verdict.outcome, verdict.level) == ("demoted", 2)
    await agree(generators, third)


async def test_a_new_publisher_calibrates_on_what_the_old_one_had_seen(memory):
    generators, fleet = Generators(), FakeFleet("int8_static", LAYERS)
    ptq = await launch(generators, fleet, guard__on_reject=["keep"])
    await ptq.publish(1)
    generators.replicas[0].kl = 0.2
    assert (await ptq.publish(2)).refused
    state = json.loads(json.dumps(ptq.state(), allow_nan=False))
    generators.replicas[0].kl = 0.01
    settings: Any = {"guard__on_reject": ["keep"], "drift__min_steps": 2}
    other = await launch(generators, fleet, state=state, **settings)
    assert (await other.publish(3)).calibration_reason == "refused"
    del state["schedule"]  # of a session that did not remember it
    other = await launch(generators, fleet, state=state, **settings)
    assert (await other.publish(4)).calibration_reason == ""


async def test_what_was_condemned_and_not_taken_back_is_after_a_restart():
    generators = Generators()
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS))
    bad = await ptq.publish(1)
    generators.replicas[0].faults["stage"] = RuntimeError("boom")
    assert await ptq.watch(2, records(bad, k3=0.5), 0) is None
    generators.replicas[0].faults.clear()
    state = json.loads(json.dumps(ptq.state()))
    other = await launch(generators, FakeFleet("int8_static", LAYERS), state=state)
    rollback = await other.watch(3, records(bad, k3=0.5), 0)
    assert other.ladder.owed == 1, "one guilt is one step"
    assert rollback is not None
    assert "mismatch 0.5" in rollback.reason
    await agree(generators, other)


async def test_a_fresh_store_forgets_what_served_but_not_the_ladder(memory):
    generators, fleet = Generators(), FakeFleet("int8_static", LAYERS)
    generators.replicas[0].kl = bad_below(1)
    ptq = await launch(generators, fleet)
    await ptq.publish(5)
    state = ptq.state()
    memory.artifacts.clear()
    memory.committed = None
    other = await launch(Generators(), fleet, state=state)
    assert (other.served_version, other.ladder.level) == (0, 1)
    assert (await other.publish(3)).outcome == "demoted"


@pytest.mark.parametrize("state", [{"schema": 7}, {"schema": 1}, {"schema": 1, "ladder": {}}])
async def test_a_state_that_is_none_is_refused(state):
    with pytest.raises(ValueError, match=r"schema|state"):
        await launch(Generators(), FakeFleet(), state=state)


@pytest.mark.parametrize("seed", range(12))
async def test_random_walks_leave_pointer_replicas_and_publisher_of_one_mind(seed):
    """Publishes, refusals, failures, deaths, judgements and restarts, as they come."""
    rng = random.Random(seed)
    count = rng.choice([1, 2, 3])
    generators, fleet = Generators(count), FakeFleet("int8_static", LAYERS)
    off_by_n = rng.choice([1, 3])
    ptq = await launch(generators, fleet, guard__recover_after=2)
    ended: set[str] = set()
    taken_back: set[str] = set()
    version = 1
    assert (await ptq.publish(version)).outcome == "accepted"
    for _ in range(60):
        replica = rng.choice(generators.replicas)
        generators.replicas[0].kl = rng.choice([0.01, 0.01, 0.01, bad_below(2), bad_below(5)])
        fault = rng.choice([None] * 6 + ["stage", "describe", "commit", "conform", "probe"])
        if fault is not None:
            once = iter([rng.choice(["die", RuntimeError("boom")])])
            replica.faults[fault] = lambda once=once: next(once, None)
        if rng.random() < 0.6:
            version += 1
            must = version - ptq.served_version > off_by_n
            verdict = await ptq.publish(version, must_serve=must)
            ended |= {verdict.outcome}
        served = [s for s in ptq.serving.history[-3:] if s.quantized]
        if served and rng.random() < 0.6:
            what = rng.choice(served).ref
            rollback = await ptq.watch(
                version, records(what, k3=rng.choice([0.01, 0.01, 0.4])), version - off_by_n
            )
            if rollback is not None:
                ended.add("exact" if rollback.exact else "in bf16")
                taken_back.add(rollback.artifact_from)
                if rollback.exact:
                    assert rollback.version_to >= version - off_by_n
        for each in generators.replicas:
            each.faults.clear()
        if rng.random() < 0.1:
            state = json.loads(json.dumps(ptq.state(), allow_nan=False))
            ptq = await launch(generators, fleet, state=state, guard__recover_after=2)
        await agree(generators, ptq)
        current = ptq.serving.current
        assert current is not None
        assert current.ref.artifact_id not in taken_back, "what was taken back serves again"
        assert current.passage.state in (State.PROBATION, State.CONFIRMED, State.CONDEMNED)
        assert len(await store.artifact_ids()) <= 8
    assert len(ended) >= 3
