"""One Quantizer replica working in rounds: real processes, real store, a tiny random policy."""

import asyncio
import pickle
import time

import pytest
import pytest_asyncio
import torch

from forge_ptq import runtime, store
from forge_ptq.config import PTQConfig
from forge_ptq.services.coordinator import Coordinator, Terms
from forge_ptq.services.fleet import FleetError, QuantizerFleet
from forge_ptq.services.quantizer import Quantizer
from forge_ptq.services.round import Item
from forge_ptq.services.work import Reference
from tests.integration.ptq_support import policy_state, random_rollouts, save_policy

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLAN = {"default": "int8_dynamic", "overrides": {"*.down_proj": "bf16"}}
VERSION = 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory):
    """(fleet of one replica, its service, coordinator, the state pushed as VERSION)."""
    await runtime.init_provisioner()
    await store.initialize()
    path = save_policy(tmp_path_factory.mktemp("policy"), "qwen3")
    state = policy_state(path, step=1)
    await store.put_weights(VERSION, state)
    env = {"OMP_NUM_THREADS": "1"}
    quantizer, coordinator = await asyncio.gather(
        Quantizer.options(mesh_name="quantizer", env=env).as_service(
            model_path=str(path), plan=PLAN
        ),
        Coordinator.options(mesh_name="coordinator", env=env).as_actor(),
    )
    cfg = PTQConfig()
    cfg.merge.heartbeat_s = 1.0
    fleet = await QuantizerFleet.launch(cfg, quantizer, None, coordinator)
    yield fleet, quantizer, coordinator, state
    await fleet.close()
    await store.shutdown()
    await runtime.shutdown()


async def test_weights_are_loaded_on_demand_and_quantized_as_planned(running):
    fleet, quantizer, _, state = running
    assert (await quantizer.status.route()).version is None
    artifact = await store.get_artifact(await fleet.quantize(VERSION))
    status = await quantizer.status.route()
    assert status.version == VERSION
    assert status.layers == artifact.manifest.layers == artifact.manifest.asked
    assert set(status.layers.values()) == {"int8_dynamic", "bf16"}
    assert artifact.manifest.calibration is None
    assert torch.equal(artifact.tensors["model.norm.weight"], state["model.norm.weight"])


async def test_unfit_versions_name_the_tensor_and_the_next_one_works(running):
    fleet, _, _, state = running
    await store.put_weights(6, {**state, "model.norm.weight": torch.ones(3)})
    with pytest.raises(FleetError, match=r"model\.norm\.weight has shape \[3\]"):
        await fleet.quantize(6)
    with pytest.raises(FleetError, match="policy_ver_0000000777"):
        await fleet.reference(777, random_rollouts(1))
    assert len(await fleet.reference(VERSION, random_rollouts(1))) == 1


async def test_references_come_in_order_and_empty_ones_cost_nothing(running):
    fleet, _, _, _ = running
    rollouts = random_rollouts(5)
    hidden = await fleet.reference(VERSION, rollouts)
    assert [h.shape[0] for h in hidden] == [len(r.token_ids) - r.response_start for r in rollouts]
    assert all(h.dtype == torch.float32 and h.shape[1] == 64 for h in hidden)
    assert fleet.last_drift == {}
    assert await fleet.reference(VERSION, []) == []


async def test_it_answers_while_it_works_and_joins_a_round_once(running):
    _, quantizer, coordinator, _ = running
    work = Reference(VERSION, random_rollouts(300, length=200), None)
    items = [Item("long", pickle.dumps(work))]
    await coordinator.open_round.call_one("once", items, Terms(1.0, 60.0))
    first = asyncio.create_task(quantizer.work.route(coordinator, "once", 1.0, 60.0))
    await asyncio.sleep(0.1)
    start = time.monotonic()
    await quantizer.status.route()
    assert await quantizer.work.route(coordinator, "once", 1.0, 60.0) == 0
    assert time.monotonic() - start < 2
    assert not first.done()
    assert await first == 1
    report = await coordinator.close.call_one("once")
    assert len(pickle.loads(report.outcome.finished["long"]).hidden) == 300
    assert report.outcome.takeovers == []
    assert await quantizer.work.route(coordinator, "once", 1.0, 60.0) == 0
    assert await quantizer.work.route(coordinator, "never opened", 1.0, 60.0) == 0


async def test_a_closed_round_takes_work_back(running):
    fleet, quantizer, coordinator, _ = running
    work = Reference(VERSION, random_rollouts(50, length=200), None)
    await coordinator.open_round.call_one("short", [Item("x", pickle.dumps(work))], Terms(1.0, 9.0))
    task = asyncio.create_task(quantizer.work.route(coordinator, "short", 0.1, 60.0))
    assert await coordinator.wait.call_one("short", 0.05) is None
    report = await coordinator.close.call_one("short")
    assert list(report.outcome.missing) == ["x"]
    assert await task == 0
    assert len(await fleet.reference(VERSION, random_rollouts(1))) == 1


async def test_a_replica_that_cannot_drop_its_item_ends_itself(running):
    fleet, quantizer, coordinator, _ = running
    before = quantizer.pids()
    work = Reference(VERSION, random_rollouts(600, length=200), None)
    await coordinator.open_round.call_one("stuck", [Item("x", pickle.dumps(work))], Terms(0.3, 9.0))
    task = asyncio.create_task(quantizer.work.route(coordinator, "stuck", 0.3, 0.2))
    assert await coordinator.wait.call_one("stuck", 0.3) is None
    await coordinator.close.call_one("stuck")
    assert await task == 0  # of the respawned one, which found the round closed
    assert quantizer.pids() != before
    assert len(await fleet.reference(VERSION, random_rollouts(1))) == 1
