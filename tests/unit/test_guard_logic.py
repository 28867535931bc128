"""The guard in interleavings: demotions, recovery, probation and rollback, with doubles of the
generator, the quantizers and the store. tests/integration/test_publish.py runs it on real ones."""

import asyncio
import itertools
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from forge_ptq import store
from forge_ptq.artifact import ArtifactRef
from forge_ptq.config import PlanConfig, PTQConfig
from forge_ptq.mismatch import SequenceMismatch
from forge_ptq.services import candidate, climb, publish_metrics, serving
from forge_ptq.services.fleet import CalibrationError, FleetError
from forge_ptq.services.passage import State
from forge_ptq.services.ptq import PTQ
from tests.integration.publish_doubles import FakeFleet, Generators, MemoryStore, episodes

LAYERS = ("l0.down_proj", "l1.down_proj", "l0.o_proj", "l1.o_proj")
LADDER = PTQConfig().guard.on_reject


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    for module in (candidate, climb, serving):
        monkeypatch.setattr(module, "GRACE_S", 0.0)
    made = MemoryStore()
    made.install(monkeypatch)
    return made


@pytest.fixture
def metrics(monkeypatch):
    recorded: list[tuple[str, float]] = []
    monkeypatch.setattr(
        publish_metrics, "record_metric", lambda name, value, _: recorded.append((name, value))
    )
    return recorded


async def launch(
    generators: Generators,
    fleet: FakeFleet,
    offered: int = 60,
    inject: Any = (),
    state: Any = None,
    **settings: Any,
) -> PTQ:
    cfg = PTQConfig()
    cfg.probe.min_sequences, cfg.probe.sequences, cfg.probe.max_sequences = 4, 8, 8
    cfg.plan = PlanConfig(default=fleet.scheme)  # type: ignore[arg-type]
    cfg.smoothing.enabled, cfg.calibration.rollouts = False, 8
    cfg.guard.demote_share, cfg.guard.recover_after = 0.25, 3
    cfg.guard.probation.episodes, cfg.guard.probation.patience = 4, 1
    for key, value in settings.items():
        block: Any = cfg
        *path, name = key.split("__")
        for part in path:
            block = getattr(block, part)
        setattr(block, name, value)
    ptq = await PTQ.attach(cfg, generators, fleet, inject, state)
    await ptq.offer(episodes(offered))
    return ptq


def bad_below(count: int) -> Any:
    """KL of an artifact: fine once this many layers are in bf16 or dynamic."""

    def kl(layers: dict[str, str]) -> float:
        return 0.01 if sum(s != "int8_static" for s in layers.values()) >= count else 0.2

    return kl


def records(ref_or_id: Any, k3: float = 0.01, count: int = 4, **changes: Any) -> list[Any]:
    artifact_id = getattr(ref_or_id, "artifact_id", ref_or_id)
    fields: dict[str, Any] = {
        "artifact_id": artifact_id, "scheme": "int8_static", "policy_version": 1, "age": 1,
        "tokens": 10, "k1_sum": 0.0, "k3_sum": 10 * k3, "ratio_sum": 10.0, "ratio_sq_sum": 11.0,
        "max_abs_gap": 0.1, "reward": 0.0, "group": "g",
    }  # fmt: skip
    return [SequenceMismatch(**(fields | changes))] * count


def path(transitions: Any) -> list[str]:
    return [t.to for t in transitions]


def overlays(fleet: FakeFleet) -> list[dict[str, str]]:
    return [dict(args[3]) for name, args in fleet.log if name == "quantize" and len(args) > 3]


async def agree(generators: Generators, ptq: PTQ) -> None:
    """Pointer, replicas and publisher name the same artifact, and it is in the store."""
    committed = await store.get_committed()
    assert committed is not None
    assert generators.live == [committed.artifact_id] * len(generators.replicas)
    assert ptq.serving.current is not None
    assert ptq.serving.current.ref == committed
    await store.get_manifest(committed)


# ---- the ladder


async def test_a_refused_candidate_is_demoted_until_it_passes(metrics):
    generators, fleet = Generators(2), FakeFleet("int8_static", LAYERS)
    generators.replicas[0].kl = bad_below(2)
    ptq = await launch(generators, fleet)
    verdict = await ptq.publish(1)
    assert (verdict.outcome, verdict.refused) == ("demoted", True), verdict.reason
    assert (verdict.attempts, verdict.demotions, verdict.level) == (3, 2, 2)
    assert verdict.scheme == "int8_dynamic:2 int8_static:2"
    assert verdict.demoted_share == pytest.approx(0.5)
    first, second = ({name: "int8_dynamic"} for name in LAYERS[:2])
    assert overlays(fleet) == [{}, first, first | second]
    await agree(generators, ptq)
    assert path(verdict.transitions) == [
        "probed", "refused", "demote", "prepare", "probed", "refused", "demote", "prepare",
        "probed", "accepted", "committed", "probation",
    ]  # fmt: skip
    refused = verdict.transitions[1]
    assert refused.numbers["perplexity_rise"] > 0.2
    assert refused.artifact_id != verdict.artifact_id
    assert verdict.perplexity_rise == pytest.approx(0.01005, rel=1e-3)
    assert "then demoted: perplexity rise 1.01%" in verdict.reason
    assert fleet.count("reference") == 1
    assert len(await store.artifact_ids()) == 1
    totals = {name: 0.0 for name, _ in metrics}
    for name, value in metrics:
        totals[name] += value
    assert totals["ptq/guard/refusals"] == totals["ptq/guard/demotions"] == 2
    assert "ptq/guard/fallbacks" not in totals
    assert totals["ptq/publish/accepted"] == totals["ptq/publish/demoted"] == 1
    assert totals["ptq/guard/level"] == pytest.approx(0.5)
    json.dumps(verdict.to_dict(), allow_nan=False)


async def test_demotions_stay_for_the_next_version_and_come_off_one_at_a_time():
    generators, fleet = Generators(), FakeFleet("int8_static", LAYERS)
    generators.replicas[0].kl = bad_below(2)
    ptq = await launch(generators, fleet)
    assert (await ptq.publish(1)).level == 2
    generators.replicas[0].kl = 0.01
    levels = []
    for version in range(2, 12):
        verdict = await ptq.publish(version)
        levels.append((verdict.level, verdict.promoted, verdict.outcome))
        assert verdict.attempts == 1
    on, off = (2, False, "demoted"), (0, False, "accepted")
    assert levels[:3] == [on] * 3
    assert levels[3:7] == [
        (1, True, "demoted"),
        *[(1, False, "demoted")] * 2,
        (0, True, "accepted"),
    ]
    assert levels[7:] == [off] * 3
    assert "promote" in path(ptq.verdicts[4].transitions)


async def test_a_promotion_refused_waits_twice_as_long():
    generators, fleet = Generators(), FakeFleet("int8_static", LAYERS)
    generators.replicas[0].kl = bad_below(1)
    ptq = await launch(generators, fleet)
    verdicts = [await ptq.publish(version) for version in range(1, 24)]
    assert [v.version for v in verdicts if v.promoted] == [5, 12]  # after 3 good ones, after 6
    for verdict in verdicts:
        assert (verdict.outcome, verdict.level) == ("demoted", 1)
        assert verdict.refused is (verdict.promoted or verdict.version == 1)
    assert fleet.count("rank") == 1, "the step on trial is the one that is taken again"
    assert ptq.ladder.steps[0].failures == 2


@pytest.mark.parametrize(("rungs", "outcome"), [(LADDER, "fell_back"), (["demote"], "kept")])
async def test_when_demotions_are_used_up_the_next_rung_follows(rungs, outcome):
    generators, fleet = Generators(), FakeFleet("int8_static", LAYERS)
    generators.replicas[0].kl = bad_below(4)
    ptq = await launch(generators, fleet, guard__on_reject=rungs)
    verdict = await ptq.publish(1)
    assert (verdict.outcome, verdict.refused, verdict.level) == (outcome, True, 2)
    assert path(verdict.transitions)[-1] == ("confirmed" if outcome == "fell_back" else "keep")
    second = await ptq.publish(2)  # goes on from there
    assert (second.outcome, second.demotions, second.level) == ("demoted", 2, 4)
    await agree(generators, ptq)


async def test_all_layers_in_bf16_is_as_far_as_demotion_goes():
    generators, fleet = Generators(), FakeFleet("int8_dynamic", LAYERS)
    generators.replicas[0].kl = 0.5
    ptq = await launch(generators, fleet, guard__on_reject=["demote"], guard__demote_attempts=9)
    verdict = await ptq.publish(1)
    assert (verdict.outcome, verdict.scheme, verdict.demotions) == ("demoted", "bf16:4", 4)
    assert path(verdict.transitions)[-1] == "confirmed"
    fleet.scheme = "int8_static"  # a new plan: what is demoted stays so
    assert (await ptq.publish(2)).scheme == "bf16:4"


async def test_a_demotion_is_no_step_back_for_a_better_plan():
    generators, fleet = Generators(), FakeFleet("int8_static", LAYERS)
    generators.replicas[0].kl = bad_below(1)
    ptq = await launch(generators, fleet)
    assert (await ptq.publish(1)).demoted_share == pytest.approx(0.25)
    fleet.scheme = "int8_dynamic"
    verdict = await ptq.publish(2)
    assert (verdict.outcome, verdict.demoted_share, verdict.level) == ("accepted", 0.0, 1)
    assert verdict.scheme == "int8_dynamic:4"


@pytest.mark.parametrize(
    "error", [FleetError("rank: nobody took it"), RuntimeError("boom"), "hang"]
)
async def test_a_ranking_that_fails_is_followed_by_the_next_rung(error):
    generators, fleet = Generators(), FakeFleet("int8_static", LAYERS)
    generators.replicas[0].kl = 0.2
    ptq = await launch(generators, fleet, deadlines__quantize_s=0.3)
    fleet.faults["rank"] = error
    verdict = await ptq.publish(1)
    assert (verdict.outcome, verdict.demotions) == ("fell_back", 0)
    assert any("demote failed: " in t.why for t in verdict.transitions)
    await agree(generators, ptq)


@pytest.mark.parametrize(
    ("attempts", "outcome"), [(1, "demoted"), (2, "demoted"), (3, "fell_back")]
)
async def test_an_injected_fault_hits_as_many_candidates_as_it_says(monkeypatch, attempts, outcome):
    fleet = FakeFleet("int8_static", LAYERS)
    generators = Generators()
    inject = [SimpleNamespace(step=1, fault="corrupt_scales", attempts=attempts)]
    ptq = await launch(generators, fleet, inject=inject)
    corrupt: list[str] = []
    real = fleet._quantize

    async def quantize(version: int, *args: Any) -> ArtifactRef:
        ref = await real(version, *args)
        corrupt.extend([ref.artifact_id] if len(args) > 1 and args[1] else [])
        return ref

    monkeypatch.setattr(fleet, "_quantize", quantize)
    replica = generators.replicas[0]
    replica.kl = lambda _: 0.5 if replica.idle in corrupt else 0.01
    verdict = await ptq.publish(1)
    assert (verdict.outcome, len(corrupt)) == (outcome, attempts)
    assert (await ptq.publish(2)).attempts == 1


async def test_live_damage_is_done_after_the_commit_of_its_version_only():
    generators = Generators(2)
    inject = [SimpleNamespace(step=2, fault="damage_live", attempts=1)]
    ptq = await launch(generators, FakeFleet("int8_dynamic"), inject=inject)
    verdicts = [await ptq.publish(version) for version in (1, 2, 3)]
    assert [r.damaged for r in generators.replicas] == [[verdicts[1].artifact_id]] * 2


async def test_more_rollouts_are_scored_while_the_guard_is_undecided(monkeypatch):
    generators, fleet = Generators(), FakeFleet("int8_dynamic")
    swing = itertools.cycle([0.0, 0.056])
    generators.replicas[0].kl = lambda _: next(swing)
    ptq = await launch(generators, fleet, offered=400, probe__max_sequences=48)
    seen: list[int] = []
    real = generators.replicas[0].probe

    async def probe(sequences: list[Any]) -> Any:
        seen.append(len(sequences))
        return await real(sequences)

    monkeypatch.setattr(generators.replicas[0], "probe", probe)
    verdict = await ptq.publish(1)
    assert verdict.outcome == "accepted", verdict.reason
    assert seen == [8, 8, 16, 16], "only what was not scored before"
    assert (verdict.probe_looks, verdict.probe_sequences) == (4, 48)
    assert "accepted by the point estimate" in verdict.reason
    assert [len(args[1]) for name, args in fleet.log if name == "reference"] == seen
    assert path(verdict.transitions)[:4] == ["probed"] * 4
    swing = itertools.cycle([0.009, 0.011])
    assert (await ptq.publish(2)).probe_looks == 1


# ---- probation


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
    generators.replicas[1].faults["conform"] = RuntimeError("it ends itself")
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


# ---- a publish under way


async def held(ptq: PTQ, replica: Any, name: str, version: int) -> tuple[Any, asyncio.Event]:
    """A publish that has come to an endpoint and waits there."""
    go, there, real = asyncio.Event(), asyncio.Event(), getattr(replica, name)

    async def waiting(*args: Any) -> Any:
        there.set()
        await go.wait()
        return await real(*args)

    setattr(replica, name, waiting)
    task = asyncio.create_task(ptq.publish(version))
    await asyncio.wait_for(there.wait(), 10)
    return task, go


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


# ---- calibration that keeps failing


async def test_a_calibration_that_keeps_failing_is_tried_less_and_less_often():
    fleet = FakeFleet("int8_static", LAYERS)
    ptq = await launch(Generators(), fleet)
    fleet.faults["calibrate"] = CalibrationError("2 of 4 shares are missing")
    tried = []
    for version in range(1, 20):
        before = fleet.count("calibrate")
        assert (await ptq.publish(version)).outcome == "fell_back"
        tried += [version] * (fleet.count("calibrate") - before)
    assert tried == [1, 2, 4, 8, 16]
    assert "it is tried again after" in ptq.verdicts[-1].reason
    assert ptq.ladder.streak == 0, "full precision for another reason is no good publish"


async def test_with_scales_at_hand_they_go_on_meanwhile():
    fleet = FakeFleet("int8_static", LAYERS)
    ptq = await launch(Generators(), fleet, calibrate_every=1)
    await ptq.publish(1)
    fleet.faults["calibrate"] = CalibrationError("2 of 4 shares are missing")
    outcomes = [(await ptq.publish(version)).outcome for version in range(2, 6)]
    assert outcomes == ["fell_back", "fell_back", "accepted", "fell_back"]
    fleet.faults.clear()
    verdicts = [await ptq.publish(version) for version in range(6, 11)]
    assert [v.calibrated for v in verdicts] == [False, False, False, True, True]


# ---- companions and A/B


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


def arm(verdict: Any, which: str, reward: float, prompt: int, drawn: bool = True) -> Any:
    artifact_id = verdict.artifact_id if which == "live" else verdict.companion_id
    return SimpleNamespace(
        completion=SimpleNamespace(
            prompt_ids=[prompt, 2], token_ids=[3], generator_version=0,
            metadata={"arm": which, "artifact_id": artifact_id, "drawn": drawn},
        ),
        reward=reward, policy_version=0,
    )  # fmt: skip


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


# ---- memory


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


async def test_what_was_condemned_and_not_taken_back_is_after_a_restart():
    generators = Generators()
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS))
    bad = await ptq.publish(1)
    generators.replicas[0].faults["stage"] = RuntimeError("boom")
    assert await ptq.watch(2, records(bad, k3=0.5), 0) is None
    generators.replicas[0].faults.clear()
    state = json.loads(json.dumps(ptq.state()))
    other = await launch(generators, FakeFleet("int8_static", LAYERS), state=state)
    rollback = await other.watch(3, [], 0)
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


# ---- all of it


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
        await asyncio.gather(*(each.conform() for each in generators.replicas))
        await agree(generators, ptq)
        current = ptq.serving.current
        assert current is not None
        assert current.ref.artifact_id not in taken_back, "what was taken back serves again"
        assert current.passage.state in (State.PROBATION, State.CONFIRMED, State.CONDEMNED)
        assert len(await store.artifact_ids()) <= 8
    assert len(ended) >= 3
