"""A full-precision companion beside the live slot, on one real engine."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch

from forge_ptq.engine.serving import MAX_RESTARTS
from forge_ptq.engine.types import ProbeSequence, RequestError, SlotStateError
from tests.integration.engine_support import (
    Harness,
    artifact_of,
    changed,
    hf_state,
    prompts,
    save_qwen3,
    tokens_of,
)

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return hf_state(save_qwen3(tmp_path_factory.mktemp("state") / "hf", tied=False))


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = save_qwen3(tmp_path_factory.mktemp("model") / "hf", tied=False)
    harness = Harness(directory, enable_prefix_caching=False)
    yield harness
    harness.thread.stop()


@pytest.fixture(autouse=True)
def _no_admission(harness: Harness) -> Any:
    yield
    harness.admit("off")
    harness.do(harness.core.discard)


def pair(state: Tensors, seed: int) -> tuple[Any, Any]:
    """The INT8 artifact of a version and its bf16 companion."""
    weights = changed(state, seed)
    return artifact_of(weights, seed), artifact_of(weights, seed, default="bf16")


def roles(harness: Harness) -> tuple[str, str]:
    """Of the live slot and of the idle one."""
    core = harness.core
    return core.slots[core.live].role, core.slots[core.idle].role


def test_each_arm_says_what_its_artifact_says(harness: Harness, state: Tensors) -> None:
    """Bit for bit what either would say alone; one version, two schemes."""
    int8, bf16 = pair(state, 1)
    asked = prompts(6)
    harness.publish(bf16)
    full = tokens_of(harness.generate(asked))
    harness.publish(int8)
    quantized = tokens_of(harness.generate(asked))
    assert full != quantized
    harness.accompany(bf16)
    assert roles(harness) == ("live", "companion")
    assert tokens_of(harness.generate(asked)) == quantized
    harness.admit("companion")
    got = harness.generate(asked)
    assert tokens_of(got) == full
    assert {(s.policy_version, s.arm, s.scheme_tag) for s in got} == {(1, "companion", "bf16")}
    harness.admit("off")
    again = harness.generate(asked)
    assert tokens_of(again) == quantized
    assert {(s.policy_version, s.arm, s.scheme_tag) for s in again} == {(1, "live", "int8_dynamic")}


def test_a_group_goes_to_one_arm(harness: Harness, state: Tensors) -> None:
    int8, bf16 = pair(state, 2)
    harness.publish(int8)
    harness.accompany(bf16)
    harness.admit("ab", fraction=0.5)
    params = [harness.params(temperature=1.0, seed=i) for i in range(4)]

    def submit() -> list[list[Any]]:
        return [[f for _, f in harness.core.submit(p, params)] for p in prompts(24)]

    groups = [[future.result(60) for future in group] for group in harness.do(submit)]
    arms = [{(s.arm, s.artifact_id, s.drawn) for s in group} for group in groups]
    assert all(len(arm) == 1 for arm in arms)
    assert {arm for one in arms for arm in one} == {
        ("live", int8.manifest.artifact_id, True),
        ("companion", bf16.manifest.artifact_id, True),
    }
    assert {s.policy_version for group in groups for s in group} == {2}


def test_a_companion_is_not_throttled(harness: Harness, state: Tensors) -> None:
    """Long prompts in both arms: steps alternate, and prefills are as large in one as in the other.
    A probe beside live prompts stays cut into chunks of idle_lane_tokens."""
    int8, bf16 = pair(state, 3)
    core, scheduler = harness.core, harness.core.scheduler
    scheduler.idle_lane_tokens = 16
    steps: list[tuple[str, int]] = []
    schedule = scheduler._schedule_lane

    def watched(slot: int, throttle: bool) -> Any:
        output = schedule(slot, throttle)
        role = core.slots[slot].role
        steps.append((role, output.total_num_scheduled_tokens))
        return output

    scheduler._schedule_lane = watched  # type: ignore[assignment, method-assign]
    asked = prompts(8, length=150)
    longest: dict[str, int] = {}
    try:
        harness.publish(int8)
        harness.stage(artifact_of(changed(state, 3), 4))
        live = harness.start(asked, max_tokens=90)
        harness.probe([ProbeSequence(p + p[:20], len(p)) for p in asked[:3]])
        assert not all(future.done() for future in live)
        [future.result(60) for future in live]
        longest["probe"] = max(tokens for role, tokens in steps if role == "candidate")
        harness.accompany(bf16)
        steps.clear()

        def submit() -> list[Any]:
            futures = []
            for mode in ("companion", "off"):
                harness.admit(mode)
                params = [harness.params(max_tokens=30)]
                futures += [core.submit(p, params)[0][1] for p in asked]
            return futures

        samples = [future.result(60) for future in harness.do(submit)]
    finally:
        scheduler._schedule_lane = schedule  # type: ignore[method-assign]
        scheduler.idle_lane_tokens = 64
    assert [s.arm for s in samples] == ["companion"] * 8 + ["live"] * 8
    assert all(a[0] != b[0] for a, b in itertools.pairwise(steps))
    for role in ("live", "companion"):
        longest[role] = max(tokens for name, tokens in steps if name == role)
    assert longest["probe"] <= 16 + 3
    assert longest["companion"] == longest["live"] > 8 * 150
    assert core.stats.pause_s < 1.0


def test_staging_ends_a_companion_at_once(harness: Harness, state: Tensors) -> None:
    """From the first moment no prompt goes there; those that do not end are answered by live, with
    the future that they had; the next companion takes prompts again."""
    int8, bf16 = pair(state, 5)
    new, new_bf16 = pair(state, 6)
    asked = prompts(3)
    harness.publish(int8)
    expected = tokens_of(harness.generate(asked, max_tokens=200))
    harness.accompany(bf16)
    harness.admit("companion")
    running = harness.start(asked, max_tokens=200)
    staging = harness.stage_future(new, drain_deadline_s=0.2)
    late = harness.start(prompts(1, seed=5), max_tokens=3)
    assert not staging.done(), "the companion had drained already: nothing was shown"
    assert late[0].result(60).arm == "live"
    report = staging.result(60)
    assert report.resubmitted == 3
    assert roles(harness) == ("live", "candidate")
    moved = [future.result(60) for future in running]
    assert {(s.policy_version, s.arm, s.drawn, s.resubmitted) for s in moved} == {
        (5, "live", False, 1)
    }
    assert [s.artifact_id for s in moved] == [int8.manifest.artifact_id] * 3
    assert [s.token_ids for s in moved] == [tokens for tokens, _ in expected]
    harness.commit(new)
    assert harness.generate(asked)[0].arm == "live"
    harness.accompany(new_bf16)
    assert {s.arm for s in harness.generate(asked)} == {"companion"}


def test_a_refused_stage_does_not_bring_the_companion_back(
    harness: Harness, state: Tensors
) -> None:
    int8, bf16 = pair(state, 5)
    harness.publish(int8)
    harness.accompany(bf16)
    harness.admit("companion")
    running = harness.start(prompts(2), max_tokens=150)
    staging = harness.stage_future(artifact_of(changed(state, 6), 6))
    assert harness.do(lambda: harness.thread.cancel_job(staging))
    assert roles(harness) == ("live", "retired")
    assert harness.generate(prompts(1))[0].arm == "live"
    assert {future.result(60).arm for future in running} == {"companion"}
    with pytest.raises(SlotStateError, match="cannot commit"):
        harness.commit(bf16)
    harness.accompany(bf16)
    assert harness.generate(prompts(1))[0].arm == "companion"


def test_discard_ends_a_companion_and_its_sequences_finish(
    harness: Harness, state: Tensors
) -> None:
    int8, bf16 = pair(state, 7)
    harness.publish(int8)
    harness.accompany(bf16)
    harness.admit("companion")
    running = harness.start(prompts(2), max_tokens=100)
    assert harness.do(harness.core.discard) is True
    assert harness.do(harness.core.discard) is False
    assert harness.generate(prompts(1))[0].arm == "live"
    assert {future.result(60).arm for future in running} == {"companion"}
    harness.accompany(bf16)
    assert harness.do(harness.core.discard) is True
    assert roles(harness) == ("live", "")
    assert harness.core.bank.companion is None


def test_what_a_companion_must_not_do(harness: Harness, state: Tensors) -> None:
    """Become live, be rolled back to, be probed as a candidate, differ in more than precision."""
    int8, bf16 = pair(state, 8)
    other_int8, other_bf16 = pair(state, 9)
    harness.publish(other_int8)
    harness.publish(int8)
    with pytest.raises(SlotStateError, match="version 9, expected the live version 8"):
        harness.accompany(other_bf16)
    with pytest.raises(SlotStateError, match="is quantized, a companion is all bf16"):
        harness.accompany(int8)
    assert harness.do(harness.core.rollback).policy_version == 9, "refusals leave the slot alone"
    harness.publish(int8)
    harness.accompany(bf16)
    with pytest.raises(SlotStateError, match="holds it as companion"):
        harness.commit(bf16)
    with pytest.raises(SlotStateError, match="cannot roll back"):
        harness.do(harness.core.rollback)
    with pytest.raises(SlotStateError, match="as companion"):
        harness.probe([ProbeSequence([1, 2, 3], 1)])
    assert not harness.do(lambda: harness.core.take_up(bf16.manifest.artifact_id))
    assert roles(harness) == ("live", "companion")


def test_precision_follows_the_load(harness: Harness, state: Tensors) -> None:
    """A short queue is answered in bf16, a long one in INT8, and bf16 again when it is over."""
    int8, bf16 = pair(state, 10)
    harness.publish(int8)
    harness.accompany(bf16)
    harness.admit("load", bf16_below=2, int8_above=8)
    futures = harness.start(prompts(20), max_tokens=20)
    arms = [future.result(60).arm for future in futures]
    assert arms == ["companion"] * 8 + ["live"] * 12
    assert [s.arm for s in harness.generate(prompts(1))] == ["companion"]


def test_an_endless_sequence_is_not_taken_along_for_ever(harness: Harness, state: Tensors) -> None:
    """Each publish moves it once, then it fails; the future is the one that its caller has."""
    versions = [artifact_of(changed(state, seed), seed) for seed in (1, 2)]
    harness.publish(versions[0])
    (endless,) = harness.start(prompts(1), max_tokens=10_000)
    # max_model_len ends it at 256 tokens, so publish faster than that
    for round_ in range(MAX_RESTARTS + 1):
        assert not endless.done()
        harness.stage(versions[(round_ + 1) % 2], drain_deadline_s=0.0)
        harness.commit(versions[(round_ + 1) % 2])
    assert not endless.done(), "it has been moved as often as it may be"
    harness.stage(versions[round_ % 2], drain_deadline_s=0.0)
    with pytest.raises(RequestError, match=f"restarted {MAX_RESTARTS} times"):
        endless.result(10)
    assert not harness.core.has_work()


def test_an_abort_finds_a_sequence_that_was_moved(harness: Harness, state: Tensors) -> None:
    """Its id is the one that its caller was given: past a deadline nothing runs on unseen."""
    int8, bf16 = pair(state, 11)
    harness.publish(int8)
    harness.accompany(bf16)
    harness.admit("companion")
    params = [harness.params(max_tokens=200)]
    submitted = harness.do(lambda: harness.core.submit(prompts(1)[0], params))
    assert harness.stage(artifact_of(changed(state, 12), 12), 0.0).resubmitted == 1
    assert harness.core.has_work()
    time.sleep(0.01)
    harness.do(lambda: harness.core.abort([request_id for request_id, _ in submitted]))
    assert submitted[0][1].cancelled()
    assert not harness.core.has_work()
    assert harness.core.scheduler.kv_cache_manager.usage == 0


def test_damage_is_real_and_a_rollback_undoes_it(harness: Harness, state: Tensors) -> None:
    """The scales that the kernel reads, of one HF module of a fused layer too."""
    first, second = (artifact_of(changed(state, seed), seed) for seed in (1, 2))
    asked = prompts(4)
    harness.publish(first)
    before = tokens_of(harness.generate(asked))
    harness.publish(second)
    sound = tokens_of(harness.generate(asked))
    layer = harness.do(harness.core.damage_live)
    assert layer == "model.layers.1.mlp.down_proj"
    damaged = harness.generate(asked)
    assert tokens_of(damaged) != sound
    assert {s.artifact_id for s in damaged} == {second.manifest.artifact_id}
    harness.do(lambda: harness.core.rollback(first.manifest.artifact_id))
    assert tokens_of(harness.generate(asked)) == before
    with pytest.raises(SlotStateError, match="as retired"):
        harness.commit(second)
    harness.publish(second)
    assert tokens_of(harness.generate(asked)) == sound
    harness.do(lambda: harness.core.damage_live("model.layers.0.self_attn.v_proj"))
    assert tokens_of(harness.generate(asked)) != sound
    with pytest.raises(SlotStateError, match=r"model\.norm: slot . has no INT8 layer"):
        harness.do(lambda: harness.core.damage_live("model.norm"))
    harness.publish(artifact_of(changed(state, 3), 3, default="bf16"))
    with pytest.raises(SlotStateError, match="no INT8 layer"):
        harness.do(harness.core.damage_live)
