"""Calibration with real processes, some of which die, stop or go mad in the middle.

Four replicas, two of them tensor-parallel groups of two, share the work; three shares, so one
replica stands by. After every fault the merged statistics must be those of one process that saw all
the rollouts, and the calibration must say who contributed and who dropped out.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from forge_ptq import runtime, store, store_io, store_stats
from forge_ptq.config import PTQConfig
from forge_ptq.numerics.plan import QuantPlan
from forge_ptq.runtime.own.death import ProcessId
from forge_ptq.services.coordinator import Coordinator
from forge_ptq.services.fleet import CalibrationError, FleetError, QuantizerFleet
from forge_ptq.services.merger import StatsMerger
from forge_ptq.services.planning import choose_plan
from forge_ptq.services.policy_batches import shortened
from forge_ptq.services.policy_copy import PolicyCopy, build_model, make_batches
from forge_ptq.services.work import Plan
from tests.fault.calibration_actors import FaultyQuantizer
from tests.integration.ptq_support import policy_state, random_rollouts, save_policy
from tests.integration.runtime_support import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLAN: dict[str, Any] = {"default": "int8_static", "overrides": {"*.down_proj": "int8_dynamic"}}
BATCH_TOKENS = 64
DEADLINE_S = 60.0
VERSION, BROKEN_VERSION = 1, 2
ROLLOUTS = random_rollouts(24)


class World:
    """All processes, and two fleets of them."""

    def __init__(self, mixed: QuantizerFleet, plain: QuantizerFleet, faults: Path, model: str):
        self.mixed, self.plain = mixed, plain
        self.faults = faults
        self.policy = PolicyCopy(build_model(model), QuantPlan.from_config(**PLAN))

    def expected(self, shift: Any = None, rollouts: Any = ROLLOUTS) -> Any:
        """What one process measures."""
        return self.policy.observe(make_batches(rollouts, BATCH_TOKENS), shift)

    async def recovered(self) -> None:
        """Wait until enough replicas are back that the next fault can be survived quickly."""

        async def enough() -> bool:
            healthy = 0
            for service in self.mixed.crew.quantizers:
                healthy += (await service.get_metrics_summary())["service"]["healthy_replicas"]
            return healthy >= 3

        await eventually(enough, 120)

    def victim(self, fault: str) -> tuple[int, str]:
        """(pid that had the fault, id of its replica)."""
        pid = int((self.faults / f"{fault}.pid").read_text())
        members = [m for _, report in self.mixed.reports for m in report.members.values()]
        return pid, next(member.id for member in members if pid in member.pids)

    async def calibrate(self, fault: str = "", rollouts: Any = ROLLOUTS) -> Any:
        """With a fault in one replica of the mixed fleet; must end within the deadline."""
        if fault:
            await self.recovered()
            (self.faults / fault).touch()
        started = time.monotonic()
        calibration = await self.mixed.calibrate(VERSION, rollouts)
        assert time.monotonic() - started < DEADLINE_S
        if fault:
            assert not (self.faults / fault).exists(), "nobody had the fault"
        return calibration


def config(smoothing: bool) -> PTQConfig:
    cfg = PTQConfig()
    cfg.merge.heartbeat_s, cfg.merge.deadline_s = 1.5, DEADLINE_S
    cfg.calibration.batch_tokens, cfg.calibration.checkpoint_every = BATCH_TOKENS, 2
    cfg.smoothing.enabled = smoothing
    return cfg


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibration")
    faults = folder / "faults"
    faults.mkdir()
    path = save_policy(folder / "policy", "qwen3", heads=(4, 2))
    await runtime.init_provisioner()
    await store.initialize()
    state = policy_state(path, step=1)
    await store.put_weights(VERSION, state)
    broken = {**state, "model.layers.0.self_attn.q_proj.weight": torch.full((128, 64), torch.nan)}
    await store.put_weights(BROKEN_VERSION, broken)
    env = {"OMP_NUM_THREADS": "1"}
    arguments = {"faults": str(faults), "model_path": str(path), "plan": PLAN}
    options = FaultyQuantizer.options
    one, two, merger, coordinator = await asyncio.gather(
        options(mesh_name="one", num_replicas=2, env=env).as_service(**arguments),
        options(mesh_name="two", num_replicas=2, procs=2, env=env).as_service(**arguments),
        StatsMerger.options(mesh_name="merger", procs=2, env=env).as_service(),
        Coordinator.options(mesh_name="coordinator", env=env).as_actor(),
    )
    mixed = await QuantizerFleet.launch(config(False), [one, two], merger, coordinator)
    plain = await QuantizerFleet.launch(config(True), one, merger, coordinator)
    made = World(mixed, plain, faults, str(path))
    made.policy.load(VERSION, state)
    yield made
    await mixed.close()
    await plain.close()
    await store.shutdown()
    await runtime.shutdown()


def assert_equal(found, expected):
    """Bit for bit, but for sums, whose order differs."""
    assert list(found) == list(expected)
    for site, stats in expected.items():
        assert found[site].tokens == stats.tokens
        assert torch.equal(found[site].absmax_C, stats.absmax_C), site
        assert torch.equal(found[site].histogram_B, stats.histogram_B), site
        torch.testing.assert_close(found[site].sum_sq_C, stats.sum_sq_C, rtol=1e-12, atol=0)


def assert_close(found, expected):
    """As far as tensor-parallel ranks, which add in another order, can agree."""
    assert list(found) == list(expected)
    for site, stats in expected.items():
        assert found[site].tokens == stats.tokens
        assert found[site].count == stats.count
        torch.testing.assert_close(found[site].absmax_C, stats.absmax_C, rtol=1e-4, atol=1e-6)
        moved = int((found[site].histogram_B - stats.histogram_B).abs().sum())
        assert moved <= 0.002 * stats.count, site


async def test_replicas_of_one_process_equal_a_single_process(world):
    calibration = await world.plain.calibrate(VERSION, ROLLOUTS)
    assert calibration.dropped == ()
    assert calibration.tokens == sum(len(rollout.token_ids) for rollout in ROLLOUTS)
    assert any(bool(shift_C.any()) for shift_C in calibration.shift.values())
    assert_equal(calibration.stats, world.expected(calibration.shift))
    q, k = (f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qk")
    assert calibration.absmax[q] == calibration.absmax[k] == calibration.stats[q].absmax
    again = await store_stats.get_calibration(calibration.round)
    assert_equal(again.stats, calibration.stats)


async def test_parts_of_an_artifact_and_references(world):
    fleet, policy = world.plain, world.policy
    ref = await fleet.quantize(VERSION)
    artifact = await store.get_artifact(ref)
    tensors, used, _ = policy.quantize(fleet.calibration.layers, fleet.calibration)
    assert artifact.manifest.layers == used
    assert artifact.tensors.keys() == tensors.keys()
    assert all(torch.equal(artifact.tensors[name], tensor) for name, tensor in tensors.items())
    record = artifact.manifest.calibration
    assert record is not None
    assert record.round == fleet.calibration.round
    assert record.contributors == fleet.calibration.contributors
    hidden = await fleet.reference(VERSION, ROLLOUTS)
    for got, expected in zip(hidden, policy.reference(ROLLOUTS), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    static = {name for name, scheme in used.items() if scheme == "int8_static"}
    assert fleet.last_drift.keys() <= static
    assert len(fleet.last_drift) == 6  # qkv, o, gate/up of two layers
    assert all(drift.clipped_fraction == 0 for drift in fleet.last_drift.values())


async def test_full_precision_and_faulty_artifacts(world):
    plain = await store.get_artifact(await world.plain.quantize(VERSION, "bf16"))
    assert set(plain.manifest.layers.values()) == {"bf16"}
    assert plain.manifest.calibration is None
    good = await store.get_artifact(await world.plain.quantize(VERSION))
    bad = await store.get_artifact(await world.plain.quantize(VERSION, None, "corrupt_scales"))
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    assert not torch.equal(good.tensors[name], bad.tensors[name])
    with pytest.raises(ValueError, match="corrupt_scales or None"):
        await world.plain.quantize(VERSION, None, "gremlins")
    with pytest.raises(FleetError, match="policy_ver_0000000777"):
        await world.plain.quantize(777)
    before = await store.artifact_ids()
    with pytest.raises(FleetError, match=r"q_proj.*weight"):
        await world.plain.quantize(BROKEN_VERSION, "bf16")
    assert await store.artifact_ids() == before


async def test_a_plan_is_searched_and_overrides_stay(world):
    fleet = world.plain
    live, plan = fleet.calibration, fleet.cfg.plan
    plan.mode, plan.budget, plan.max_evaluations = "auto", 10.0, 3
    try:
        with pytest.raises(CalibrationError, match="no rollouts to measure plans on"):
            await fleet.calibrate(VERSION, ROLLOUTS)
        assert fleet.calibration is live
        calibration = await fleet.calibrate(VERSION, ROLLOUTS, random_rollouts(4, seed=1))
    finally:
        plan.mode = "fixed"
    schemes = dict(calibration.layers)
    down = {name for name in schemes if name.endswith("down_proj")}
    assert {schemes.pop(name) for name in down} == {"int8_dynamic"}  # as PLAN says
    assert set(schemes.values()) == {"int8_static"}
    assert 0 < calibration.predicted_rise < 10
    ref = await fleet.quantize(VERSION)
    record = (await store.get_manifest(ref)).calibration
    assert record is not None
    assert (record.budget, record.predicted_rise) == (10.0, calibration.predicted_rise)


async def test_tensor_parallel_replicas_contribute_slices(world):
    calibration = await world.calibrate()
    assert calibration.dropped == ()
    assert_close(calibration.stats, world.expected())
    assert len(await world.mixed.reference(VERSION, ROLLOUTS)) == len(ROLLOUTS)
    artifact = await store.get_artifact(await world.mixed.quantize(VERSION))
    expected, _, _ = world.policy.quantize(calibration.layers, calibration)
    assert all(torch.equal(artifact.tensors[name], tensor) for name, tensor in expected.items())


async def test_a_tensor_parallel_replica_searches_the_plan_of_one_process(world):
    cfg, crew = config(False), world.mixed.crew
    rollouts = shortened(random_rollouts(4, seed=1), cfg.plan.response_tokens)

    def single(budget: float, stats: Any) -> Any:
        work = Plan(
            version=VERSION, round=1, pass_=1, shift={}, method=cfg.calibration.range,
            percentile=cfg.calibration.percentile, auto=True, budget=budget, max_evaluations=5,
            rollouts=rollouts,
        )  # fmt: skip
        return choose_plan(world.policy, work, stats, lambda done: None)

    cheapest = single(1e9, world.expected())
    cfg.plan.mode, cfg.plan.max_evaluations = "auto", 5
    cfg.plan.budget = cheapest.predicted_rise / 2
    fleet = await QuantizerFleet.launch(
        cfg, crew.quantizers[1], world.mixed.merger, crew.coordinator
    )
    fleet.calibration = None  # it would be tried first
    calibration = await fleet.calibrate(VERSION, ROLLOUTS, rollouts)
    assert not any(kind == "plan" and r.outcome.takeovers for kind, r in fleet.reports)
    expected = single(cfg.plan.budget, calibration.stats)
    assert expected.layers != cheapest.layers
    assert calibration.layers == expected.layers
    assert calibration.predicted_rise == pytest.approx(expected.predicted_rise, rel=0.02)
    artifact = await store.get_artifact(await fleet.quantize(VERSION))
    assert artifact.manifest.layers == expected.layers
    await fleet.close()


async def test_some_shares_without_rollouts(world):
    few = ROLLOUTS[:2]
    calibration = await world.calibrate(rollouts=few)
    assert calibration.tokens == sum(len(rollout.token_ids) for rollout in few)
    assert_close(calibration.stats, world.expected(rollouts=few))
    with pytest.raises(CalibrationError, match="no rollouts"):
        await world.mixed.calibrate(VERSION, [])


async def test_a_replica_that_goes_mad(world):
    calibration = await world.calibrate("nan")
    _, victim = world.victim("nan")
    # It says so itself, or is lost first where the machine is too busy for its heartbeat.
    lines = [line for line in calibration.dropped if line.startswith(victim)]
    assert any("NaN" in line or line.endswith(": lost") for line in lines), calibration.dropped
    assert_close(calibration.stats, world.expected())


async def test_a_replica_that_hangs_is_replaced(world):
    calibration = await world.calibrate("stop_before_put")
    pid, victim = world.victim("stop_before_put")
    # "lost", or what the surviving rank of its group saw of the death before it went too
    assert any(line.startswith(victim) for line in calibration.dropped)
    assert victim not in calibration.contributors
    assert_close(calibration.stats, world.expected())

    async def gone() -> bool:
        return not ProcessId.of(pid).alive()

    await eventually(gone)


@pytest.mark.parametrize("fault", ["kill_before_put", "kill_before_mark", "kill_after_put"])
async def test_a_replica_that_dies(world, fault):
    calibration = await world.calibrate(fault)
    _, victim = world.victim(fault)
    # Lost; or told as an error by rank 0, if its group noticed the death before the runtime did.
    assert any(line.startswith(victim) for line in calibration.dropped)
    assert calibration.contributors
    assert_close(calibration.stats, world.expected())


async def test_broken_weights_are_not_survived_and_the_last_calibration_stays(world):
    live = world.mixed.calibration
    with pytest.raises(CalibrationError, match=r"0 of 3 shares.*quorum.*NaN"):
        await world.mixed.calibrate(BROKEN_VERSION, ROLLOUTS)
    assert world.mixed.calibration is live
    relaunched = await QuantizerFleet.launch(
        world.mixed.cfg,
        world.mixed.crew.quantizers,
        world.mixed.merger,
        world.mixed.crew.coordinator,
    )
    assert relaunched.calibration is not None
    assert relaunched.calibration.round == live.round


async def test_a_merger_that_hangs_is_replaced(world):
    merger, limits = world.mixed.merger, world.mixed.cfg.merge
    stopped = await runtime.pids(merger)
    os.kill(stopped[1], signal.SIGSTOP)
    limits.deadline_s = 10.0
    try:
        with pytest.raises(CalibrationError, match="no answer to merge"):
            await world.mixed.calibrate(VERSION, ROLLOUTS)
    finally:
        limits.deadline_s = DEADLINE_S

    async def fresh() -> bool:
        pids = await runtime.pids(merger)
        return len(pids) == len(stopped) and not set(pids) & set(stopped)

    await eventually(fresh, 60)
    assert_close((await world.calibrate()).stats, world.expected())
    assert await store_io.keys("ptq_stats") == []


async def test_a_coordinator_that_died_is_replaced(world):
    fleet = world.mixed
    (pid,) = await runtime.pids(fleet.crew.coordinator)
    os.kill(pid, signal.SIGKILL)
    assert len(await fleet.reference(VERSION, ROLLOUTS[:2])) == 2
    assert await runtime.pids(fleet.crew.coordinator) != [pid]
