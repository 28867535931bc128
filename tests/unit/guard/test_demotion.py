"""Refusals, demotions and recovery, faults on purpose, and calibrations that keep failing; over
doubles. tests/integration/test_publish.py runs the same on real generators and quantizers."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest

from forge_ptq import store
from forge_ptq.artifact import ArtifactRef
from forge_ptq.services.fleet import CalibrationError, FleetError
from tests.integration.publish_doubles import FakeFleet, Generators
from tests.unit.guard.support import (
    LADDER,
    LAYERS,
    agree,
    bad_below,
    launch,
    overlays,
    path,
)


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
    assert verdict.refused_rise == refused.numbers["perplexity_rise"]
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


@pytest.mark.parametrize(("rungs", "outcome"), [(LADDER, "fell_back"), (["demote"], "kept")])
@pytest.mark.parametrize("phase", ["quantize", "stage", "probe", "commit"])
async def test_a_demoted_candidate_that_fails_is_followed_by_the_next_rung(
    monkeypatch, rungs, outcome, phase
):
    generators, fleet = Generators(), FakeFleet("int8_static", LAYERS)
    ptq = await launch(generators, fleet, guard__on_reject=rungs)
    good = await ptq.publish(1)
    replica = generators.replicas[0]
    replica.kl = bad_below(1)

    def fails_demoted(*args: Any) -> RuntimeError | None:
        overlay = overlays(fleet)[-1] if fleet.log[-1][0] != "rank" else {}
        in_bf16 = fleet.log[-1][1][1:2] == ("bf16",)
        return RuntimeError("boom") if overlay and not in_bf16 else None

    if phase == "quantize":
        real = fleet._quantize

        async def quantize(*args: Any) -> Any:
            if error := fails_demoted():
                raise error
            return await real(*args)

        monkeypatch.setattr(fleet, "_quantize", quantize)
    else:
        replica.faults[phase] = fails_demoted
    verdict = await ptq.publish(2)
    assert (verdict.outcome, verdict.demotions) == (outcome, 1), verdict.reason
    assert f"then demoted: {phase} failed: " in verdict.reason
    assert generators.live == [verdict.artifact_id if outcome == "fell_back" else good.artifact_id]
    await agree(generators, ptq)
