"""The full-precision companion and the A/B test; over doubles."""

from __future__ import annotations

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
    launch,
)


async def test_the_companion_is_made_kept_and_replaced():
    generators, fleet = Generators(2), FakeFleet("int8_static", LAYERS)
    ptq = await launch(generators, fleet, precision_by_load__enabled=True)
    first = await ptq.publish(1)
    assert first.companion_id is not None
    assert [r.companion for r in generators.replicas] == [first.companion_id] * 2
    assert set(await store.artifact_ids()) == {first.artifact_id, first.companion_id}
    generators.replicas[0].kl = bad_below(9)
    ptq.cfg.guard.on_reject = ["keep"]
    kept = await ptq.publish(2)
    assert (kept.outcome, kept.companion_id) == ("kept", first.companion_id)
    assert [r.companion for r in generators.replicas] == [first.companion_id] * 2
    generators.replicas[0].kl = 0.01
    third = await ptq.publish(3)
    assert third.companion_id not in (None, first.companion_id)
    assert first.companion_id not in await store.artifact_ids()
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
    assert (verdict.outcome, verdict.companion_id) == ("accepted", None)
    await agree(generators, ptq)


@pytest.mark.parametrize(
    ("live", "drawn", "fails"), [(0.2, True, True), (0.2, False, False), (0.98, True, False)]
)
async def test_rewards_that_disagree_take_it_back(metrics, live, drawn, fails):
    generators = Generators()
    ptq = await launch(
        generators, FakeFleet("int8_static", LAYERS), ab__enabled=True, ab__min_prompts=8
    )
    verdict = await ptq.publish(1)
    for number in range(10):
        noise = 0.01 * (number % 3)
        await ptq.offer([arm(verdict, "live", live + noise, number, drawn)] * 2)
        await ptq.offer([arm(verdict, "companion", 1.0 + noise, number, drawn)] * 2)
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
