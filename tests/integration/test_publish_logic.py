"""PTQ's decisions in interleavings that real generators reach only by luck.

The store is real. The generator and the fleet of quantizers are small doubles with the same calls,
whose failures are set by hand; test_publish.py runs the same facade on the real ones.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import torch

from forge_ptq import runtime, store
from forge_ptq.artifact import ArtifactRef
from forge_ptq.config import PlanConfig, PTQConfig
from forge_ptq.numerics.drift import Drift
from forge_ptq.services import candidate, climb, serving
from forge_ptq.services.fleet import CalibrationError
from forge_ptq.services.ptq import PTQ
from tests.integration.publish_doubles import FakeFleet, Generators, episodes

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def running_store():
    await runtime.init_provisioner()
    await store.initialize()
    with pytest.MonkeyPatch.context() as patch:
        for module in (candidate, climb, serving):  # these fleets have no rounds to wait for
            patch.setattr(module, "GRACE_S", 0.0)
        yield
    await store.shutdown()
    await runtime.shutdown()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def clean_store(running_store):
    await store.set_committed(None)
    for artifact_id in await store.artifact_ids():
        await store.drop_artifact(artifact_id)
    for version in await store.weight_versions():
        await store.drop_weights(version)


async def launch(generators: Generators, fleet: FakeFleet, offered: int = 40, **settings):
    cfg = PTQConfig()
    cfg.probe.min_sequences, cfg.probe.sequences = 4, 8
    cfg.plan = PlanConfig(default=fleet.scheme)  # type: ignore[arg-type]
    cfg.smoothing.enabled = False
    cfg.guard.on_reject = ["keep"]
    for key, value in settings.items():
        block, _, name = key.partition("__")
        setattr(getattr(cfg, block) if name else cfg, name or block, value)
    ptq = await PTQ.attach(cfg, generators, fleet)
    await ptq.offer(episodes(offered))
    return ptq


async def committed_id() -> str | None:
    ref = await store.get_committed()
    return ref.artifact_id if ref else None


async def test_accepted_moves_pointer_and_every_replica():
    generators = Generators(2)
    ptq = await launch(generators, FakeFleet())
    verdict = await ptq.publish(1)
    assert (verdict.outcome, verdict.refused, verdict.probe_sequences) == ("accepted", False, 8)
    assert verdict.perplexity_rise == pytest.approx(0.01005, rel=1e-3)
    assert verdict.pause_s == 0.02
    assert verdict.scheme == "int8_dynamic:1"
    assert generators.live == [verdict.artifact_id] * 2
    assert await committed_id() == verdict.artifact_id


async def test_too_few_probe_rollouts_cost_nothing():
    generators, fleet = Generators(), FakeFleet()
    ptq = await launch(generators, fleet, offered=4)
    verdict = await ptq.publish(1)
    assert verdict.outcome == "kept"
    assert "not enough probe rollouts: have" in verdict.reason
    assert "need 4" in verdict.reason
    assert fleet.log == []
    assert {verdict.quantize_s, verdict.stage_s, verdict.pause_s, verdict.bytes} == {None}
    assert generators.replicas[0].calls == []


@pytest.mark.parametrize("offered", [0, 40])
async def test_must_serve_falls_back_to_bf16(offered):
    generators = Generators()
    generators.replicas[0].kl = 0.5
    ptq = await launch(generators, FakeFleet(), offered=offered)
    verdict = await ptq.publish(1, must_serve=True)
    assert verdict.outcome == "fell_back"
    assert verdict.scheme == "bf16:1"
    assert verdict.refused is (offered > 0)
    assert "then in bf16" in verdict.reason
    assert generators.live == [verdict.artifact_id]
    if offered:  # the numbers are those of the refusal
        assert verdict.perplexity_rise > 0.5


async def test_on_reject_bf16_serves_the_same_version_and_reuses_the_reference():
    generators, fleet = Generators(), FakeFleet()
    generators.replicas[0].kl = 0.2
    ptq = await launch(generators, fleet, guard__on_reject=["bf16"])
    verdict = await ptq.publish(1)
    assert (verdict.outcome, verdict.refused) == ("fell_back", True)
    assert fleet.count("reference") == 1
    generators.replicas[0].kl = 0.01
    assert (await ptq.publish(2)).outcome == "accepted"
    assert fleet.count("reference") == 2


async def test_refused_keeps_and_empties_the_idle_slot_and_the_store():
    generators = Generators()
    ptq = await launch(generators, FakeFleet())
    first = await ptq.publish(1)
    generators.replicas[0].kl = 0.2
    second = await ptq.publish(2)
    assert (second.outcome, second.refused) == ("kept", True)
    assert "limit 3.00%" in second.reason
    assert generators.live == [first.artifact_id]
    assert generators.replicas[0].idle is None
    assert await committed_id() == first.artifact_id
    with pytest.raises(store.StoreError):
        await store.get_manifest(ArtifactRef(second.artifact_id, 2))


@pytest.mark.parametrize("fault", [RuntimeError("boom"), "hang"])
@pytest.mark.parametrize("phase", ["quantize", "reference", "stage", "describe", "probe"])
async def test_any_phase_that_fails_or_hangs_keeps_what_serves(phase, fault):
    generators, fleet = Generators(2), FakeFleet()
    ptq = await launch(generators, fleet)
    first = await ptq.publish(1)
    for limit in ("quantize_s", "stage_s", "probe_s", "commit_s"):
        setattr(ptq.cfg.deadlines, limit, 0.5 if fault == "hang" else 10.0)
    target = fleet if hasattr(fleet, f"_{phase}") else generators.replicas[0]
    target.faults[phase] = fault
    second = await ptq.publish(2)
    assert second.outcome == "kept"
    expected = f"no answer to {phase} within 0.5 s" if fault == "hang" else "boom"
    assert expected in second.reason
    assert not second.refused
    assert (second.probe_s, second.pause_s) == (None, None)
    assert generators.live == [first.artifact_id] * 2
    assert all(replica.idle is None for replica in generators.replicas) or phase == "quantize"
    assert await committed_id() == first.artifact_id
    target.faults.clear()
    third = await ptq.publish(3)
    assert third.outcome == "accepted"
    assert generators.live == [third.artifact_id] * 2


@pytest.mark.parametrize("phase", ["stage", "describe"])
async def test_a_replica_that_dies_before_commit_keeps(phase):
    generators = Generators(2)
    ptq = await launch(generators, FakeFleet())
    first = await ptq.publish(1)
    generators.replicas[1].faults[phase] = "die"
    verdict = await ptq.publish(2)
    assert verdict.outcome == "kept"
    assert "1 of 2 generator replicas died" in verdict.reason
    assert generators.live == [first.artifact_id] * 2


@pytest.mark.parametrize("count", [1, 2])
async def test_a_replica_that_dies_in_commit_comes_back_with_the_new_artifact(count):
    generators = Generators(count)
    ptq = await launch(generators, FakeFleet())
    await ptq.publish(1)
    generators.replicas[-1].faults["commit"] = "die"
    verdict = await ptq.publish(2)
    assert verdict.outcome == "accepted"
    assert generators.live == [verdict.artifact_id] * count
    assert await committed_id() == verdict.artifact_id


async def test_no_replica_flips_and_the_pointer_moves_back():
    generators = Generators(2)
    ptq = await launch(generators, FakeFleet())
    first = await ptq.publish(1)
    for replica in generators.replicas:
        replica.faults["commit"] = RuntimeError("not staged")
    verdict = await ptq.publish(2)
    assert verdict.outcome == "kept"
    assert "no generator replica would flip: not staged" in verdict.reason
    assert generators.live == [first.artifact_id] * 2
    assert await committed_id() == first.artifact_id


async def test_every_replica_dies_in_commit_and_comes_back_with_the_old_artifact():
    generators = Generators(2)
    ptq = await launch(generators, FakeFleet())
    first = await ptq.publish(1)
    for replica in generators.replicas:
        replica.faults["commit"] = "die early"
    verdict = await ptq.publish(2)
    assert verdict.outcome == "kept"
    assert "none came back with it" in verdict.reason
    assert await committed_id() == first.artifact_id
    assert ptq.served_version == 1


@pytest.mark.parametrize("failing", [1, 2])
async def test_a_pointer_that_may_have_moved_names_a_stored_artifact(monkeypatch, failing):
    """The store takes the pointer and does not say so; then also not when it is moved back."""
    generators = Generators()
    ptq = await launch(generators, FakeFleet())
    first = await ptq.publish(1)
    real, calls = store.set_committed, []

    async def landing_silently(ref: Any) -> None:
        calls.append(ref)
        if len(calls) == 1:
            await real(ref)
        if len(calls) <= failing:
            raise store.StoreError("put ptq_committed: no answer from the store within 1 s")
        await real(ref)

    monkeypatch.setattr(store, "set_committed", landing_silently)
    verdict = await ptq.publish(2)
    assert verdict.outcome == "kept"
    assert "commit failed: the pointer could not be moved" in verdict.reason
    assert generators.live == [first.artifact_id]
    committed = await store.get_committed()
    assert committed is not None
    assert committed.policy_version == failing
    await store.get_manifest(committed)
    await store.get_manifest(ArtifactRef(first.artifact_id, 1))
    assert (await ptq.publish(3)).outcome == "accepted"


async def test_moving_back_fails_after_no_replica_flipped(monkeypatch):
    generators = Generators()
    ptq = await launch(generators, FakeFleet())
    first = await ptq.publish(1)
    generators.replicas[0].faults["commit"] = RuntimeError("not staged")
    real = store.set_committed

    async def not_back(ref: ArtifactRef) -> None:
        if ref.policy_version == 1:
            raise store.StoreError("put ptq_committed: no answer")
        await real(ref)

    monkeypatch.setattr(store, "set_committed", not_back)
    verdict = await ptq.publish(2)
    assert verdict.outcome == "kept"
    assert generators.live == [first.artifact_id]
    committed = await store.get_committed()
    assert committed == ArtifactRef(verdict.artifact_id, 2)
    await store.get_manifest(committed)


async def test_nothing_is_deleted_while_the_pointer_cannot_be_read(monkeypatch):
    ptq = await launch(Generators(), FakeFleet())
    for version in (1, 2):
        await ptq.publish(version)

    async def silent() -> None:
        raise store.StoreError("get ptq_committed: no answer")

    monkeypatch.setattr(store, "get_committed", silent)
    await ptq.publish(3)
    assert len(await store.artifact_ids()) == 3
    monkeypatch.undo()
    await ptq.publish(4)
    assert len(await store.artifact_ids()) == 2


async def test_what_a_late_quantizer_stores_goes_with_the_next_publish(monkeypatch):
    generators, fleet = Generators(), FakeFleet()
    ptq = await launch(generators, fleet, deadlines__quantize_s=0.3)
    await ptq.publish(1)
    real, late = fleet._quantize, []

    async def slow(*args: Any) -> ArtifactRef:
        async def work() -> None:
            await asyncio.sleep(0.5)
            await real(*args)

        late.append(asyncio.create_task(work()))
        await asyncio.sleep(60)
        raise AssertionError("the deadline comes first")

    monkeypatch.setattr(fleet, "_quantize", slow)
    verdict = await ptq.publish(2)
    assert "no answer to quantize" in verdict.reason
    await asyncio.wait_for(late[0], 10)
    assert len(await store.artifact_ids()) == 2
    monkeypatch.undo()
    ptq.cfg.deadlines.quantize_s = 10.0
    last = await ptq.publish(3)
    assert len(await store.artifact_ids()) == 2
    await store.get_manifest(ArtifactRef(last.artifact_id, 3))


async def test_nobody_answers_after_the_flip_and_the_pointer_decides():
    generators = Generators()
    ptq = await launch(generators, FakeFleet(), deadlines__stage_s=0.5, deadlines__commit_s=0.5)
    await ptq.publish(1)
    replica = generators.replicas[0]

    def stop_answering() -> str:
        replica.faults["describe"] = "hang"
        return "hang"

    replica.faults["commit"] = stop_answering
    verdict = await ptq.publish(2)
    assert verdict.outcome == "accepted"
    assert await committed_id() == verdict.artifact_id


async def test_a_replica_left_behind_is_brought_along():
    # It came back between stage and commit: its idle slot is empty, the other one has flipped.
    generators = Generators(2)
    ptq = await launch(generators, FakeFleet())
    await ptq.publish(1)
    lagging = generators.replicas[1]

    def respawned_once() -> None:
        lagging.idle = None
        lagging.faults.clear()

    lagging.faults["commit"] = respawned_once
    verdict = await ptq.publish(2)
    assert verdict.outcome == "accepted"
    assert generators.live == [verdict.artifact_id] * 2
    assert await committed_id() == verdict.artifact_id


async def test_an_engine_that_runs_another_scheme_is_refused(monkeypatch):
    generators = Generators()
    ptq = await launch(generators, FakeFleet())
    real = generators.replicas[0].describe

    async def lying() -> dict[str, Any]:
        description = await real()
        description["slots"][1]["layers"] = {"a": "bf16"}
        return description

    monkeypatch.setattr(generators.replicas[0], "describe", lying)
    verdict = await ptq.publish(1)
    assert verdict.outcome == "kept"
    assert verdict.reason.startswith("audit: ")
    assert not verdict.refused


async def test_older_versions_and_closed_publishers_do_nothing():
    generators, fleet = Generators(), FakeFleet()
    ptq = await launch(generators, fleet)
    await ptq.publish(5)
    before = len(fleet.log)
    assert (await ptq.publish(4)).reason == "version 5 serves already"
    await ptq.close()
    assert (await ptq.publish(6)).reason == "PTQ is closed"
    assert len(fleet.log) == before


async def test_publishes_take_turns():
    generators, fleet = Generators(), FakeFleet()
    ptq = await launch(generators, fleet)
    verdicts = await asyncio.gather(*(ptq.publish(version) for version in (1, 2, 3)))
    assert [v.outcome for v in verdicts] == ["accepted"] * 3
    assert [args[0] for name, args in fleet.log if name == "quantize"] == [1, 2, 3]
    assert generators.live == [verdicts[2].artifact_id]
    assert list(ptq.verdicts) == verdicts


async def test_calibration_period_counts_trainer_steps():
    fleet = FakeFleet("int8_static")
    ptq = await launch(Generators(), fleet, calibrate_every=4, calibration__rollouts=8)
    verdicts = [await ptq.publish(version) for version in (1, 3, 5, 6, 10)]
    assert [v.calibrated for v in verdicts] == [True, False, True, False, True]
    assert [v.calibration_reason for v in verdicts] == ["first", "", "period", "", "period"]
    assert [v.calibration_round for v in verdicts] == [1, 1, 2, 2, 3]
    assert [v.calibration_version for v in verdicts] == [1, 1, 5, 5, 10]
    assert verdicts[1].calibrate_s is None
    assert verdicts[0].calibrate_s > 0
    last = verdicts[-1]
    assert (last.contributors, last.dropped) == (("host:1", "host:2"), ("host:3: NaN",))
    assert (last.calibration_tokens, last.flop_share) == (8, {"int8_static": 1.0})


async def test_drift_makes_the_next_publish_calibrate():
    fleet = FakeFleet("int8_static")
    ptq = await launch(Generators(), fleet, calibration__rollouts=8, drift__min_steps=2)
    assert (await ptq.publish(1)).drift_exceeded is None
    fleet.drift = Drift(0.25, 0.3, 2.0)
    drifted = await ptq.publish(3)
    assert (drifted.outcome, drifted.calibrated) == ("accepted", False)
    numbers = (
        drifted.drift_clipped_fraction, drifted.drift_js_distance, drifted.drift_absmax_ratio,
    )  # fmt: skip
    assert numbers == (0.25, 0.3, 2.0)
    assert drifted.drift_layer == "a"
    fleet.drift = Drift(0.0, 0.01, 1.0)
    again = await ptq.publish(4)
    assert again.calibrated
    assert again.calibration_reason == f"drift: {drifted.drift_exceeded}"
    assert not (await ptq.publish(6)).calibrated


async def test_a_refused_candidate_is_calibrated_anew_unless_it_was_corrupted_on_purpose():
    generators, fleet = Generators(), FakeFleet("int8_static")
    ptq = await launch(generators, fleet, calibration__rollouts=8, drift__min_steps=1)
    assert (await ptq.publish(1)).calibrated
    generators.replicas[0].kl = 0.2
    ptq.faults.inject = [SimpleNamespace(step=2, fault="corrupt_scales", attempts=1)]
    assert (await ptq.publish(2)).refused
    third = await ptq.publish(3)
    assert (third.refused, third.calibrated) == (True, False)
    generators.replicas[0].kl = 0.01
    fourth = await ptq.publish(4)
    assert (fourth.outcome, fourth.calibration_reason) == ("accepted", "refused")
    assert not (await ptq.publish(6)).calibrated


@pytest.mark.parametrize("fault", [CalibrationError("2 of 4 shares are missing"), "hang"])
@pytest.mark.parametrize("earlier", [False, True])
async def test_a_calibration_that_misses_its_quorum_is_served_in_bf16(fault, earlier):
    generators, fleet = Generators(), FakeFleet("int8_static")
    ptq = await launch(generators, fleet, calibrate_every=1, calibration__rollouts=8)
    if earlier:
        assert (await ptq.publish(1)).calibrated
    ptq.cfg.deadlines.calibrate_s = 0.5
    fleet.faults["calibrate"] = fault
    verdict = await ptq.publish(2)
    assert (verdict.outcome, verdict.refused) == ("fell_back", False)
    why = "no answer to calibrate within 0.5 s" if fault == "hang" else "2 of 4 shares are missing"
    assert verdict.reason.startswith(f"calibrate failed: {why}; then in bf16: ")
    assert (verdict.calibrated, verdict.calibration_failed) == (False, True)
    assert verdict.scheme == "bf16:1"
    assert verdict.calibration_round is None
    assert generators.live == [verdict.artifact_id]
    fleet.faults.clear()
    after = await ptq.publish(3)
    assert (after.outcome, after.calibrated, after.calibration_failed) == ("accepted", True, False)


async def test_a_calibration_that_fails_otherwise_keeps():
    generators, fleet = Generators(), FakeFleet("int8_static")
    ptq = await launch(generators, fleet, calibration__rollouts=8)
    fleet.faults["calibrate"] = store.StoreError("get policy_ver_1: no answer")
    verdict = await ptq.publish(1)
    assert verdict.outcome == "kept"
    assert "calibrate failed: StoreError: get policy_ver_1" in verdict.reason
    assert generators.replicas[0].calls == []


async def test_too_few_rollouts_to_calibrate_cost_nothing():
    generators, fleet = Generators(), FakeFleet("int8_static")
    ptq = await launch(generators, fleet, calibration__rollouts=400)
    verdict = await ptq.publish(1)
    assert verdict.outcome == "kept"
    assert "not enough calibration rollouts: have" in verdict.reason
    assert (fleet.log, generators.replicas[0].calls) == ([], [])
    served = await ptq.publish(1, must_serve=True)
    assert served.outcome == "fell_back"


async def test_quantization_off_serves_bf16_unprobed():
    generators, fleet = Generators(), FakeFleet()
    ptq = await launch(generators, fleet, offered=0, enabled=False)
    verdict = await ptq.publish(1)
    assert (verdict.outcome, verdict.scheme) == ("accepted", "bf16:1")
    assert fleet.count("reference") == 0


async def test_retention_keeps_what_serves_and_the_one_before():
    generators = Generators()
    ptq = await launch(generators, FakeFleet())
    refs = []
    for version in range(1, 6):
        await store.put_weights(version, {"w": torch.ones(1)})
        verdict = await ptq.publish(version)
        refs.append(ArtifactRef(verdict.artifact_id, version))
    assert await store.weight_versions() == [4, 5]
    for ref in refs[:3]:
        with pytest.raises(store.StoreError):
            await store.get_manifest(ref)
    for ref in refs[3:]:
        await store.get_manifest(ref)


async def test_a_new_publisher_knows_what_serves():
    generators = Generators()
    await (await launch(generators, FakeFleet())).publish(7)
    ptq = await launch(generators, FakeFleet())
    assert (await ptq.publish(6)).reason == "version 7 serves already"


async def test_injected_fault_reaches_only_its_version():
    fleet = FakeFleet()
    cfg = PTQConfig()
    cfg.probe.min_sequences, cfg.smoothing.enabled = 4, False
    inject = [SimpleNamespace(step=2, fault="corrupt_scales", attempts=1)]
    ptq = await PTQ.attach(cfg, Generators(), fleet, inject)
    await ptq.offer(episodes(40))
    for version in (1, 2, 3):
        await ptq.publish(version)
    faults = [args[2] for name, args in fleet.log if name == "quantize"]
    assert faults == [None, "corrupt_scales", None]


async def test_cancelling_a_publish_empties_the_idle_slot():
    generators = Generators()
    ptq = await launch(generators, FakeFleet(), deadlines__probe_s=30.0)
    generators.replicas[0].faults["probe"] = "hang"
    task = asyncio.create_task(ptq.publish(1))
    await asyncio.wait({task}, timeout=1.0)
    assert generators.replicas[0].calls[-1] == "probe"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert generators.replicas[0].idle is None
    assert generators.live == [None]
    generators.replicas[0].faults.clear()
    assert (await ptq.publish(2)).outcome == "accepted"
