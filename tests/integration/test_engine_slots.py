"""What the slots refuse, how they drain, and how they are probed; one real engine for the file."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_ptq.artifact import ArtifactError, QuantizedArtifact
from forge_ptq.engine.types import ProbeSequence, RequestError, SlotStateError
from tests.integration.engine_support import (
    MIXED,
    Harness,
    artifact_of,
    changed,
    hf_state,
    prompts,
    save_qwen3,
    tokens_of,
)

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("model") / "hf", tied=False)


@pytest.fixture(scope="module")
def harness(directory: Path) -> Any:
    harness = Harness(directory, enable_prefix_caching=True)
    yield harness
    harness.thread.stop()


@pytest.fixture(scope="module")
def state(directory: Path) -> Tensors:
    return hf_state(directory)


def _drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def _nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[3] = float("nan")
    return tensor


DAMAGES: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing weight": (_drop(f"{LAYER}.weight"), f"{LAYER}.weight: missing"),
    "missing input_scale": (_drop(f"{LAYER}.input_scale"), f"{LAYER}.input_scale: missing"),
    "missing norm": (_drop("model.norm.weight"), "model.norm.weight: missing"),
    "missing lm_head": (_drop("lm_head.weight"), "lm_head.weight: missing"),
    "transposed": (_set(f"{LAYER}.weight", lambda t: t.t().contiguous()), "expected shape"),
    "wrong dtype": (_set("model.norm.weight", lambda t: t.float()), "expected dtype"),
    "left over": (lambda t: t.update({"model.extra": torch.ones(1)}), "no place for it"),
    "nan": (_set("model.embed_tokens.weight", _nan), "NaN"),
    "zero scale": (_set(f"{LAYER}.weight_scale", lambda t: t * 0), "positive"),
    "disagreeing input_scale": (_set(f"{LAYER}.input_scale", lambda t: t * 2), "share one input"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damaged_artifacts_touch_nothing(harness: Harness, state: Tensors, damage: str) -> None:
    """Refused before anything is overwritten: live slot and the one to roll back to stay."""
    a, b = artifact_of(changed(state, 1), 1), artifact_of(changed(state, 2), 2)
    harness.publish(a)
    asked = prompts(3)
    harness.generate(asked)
    was_a = harness.generate(asked)
    harness.publish(b)
    harness.generate(asked)
    was_b = harness.generate(asked)
    broken = artifact_of(changed(state, 3), 3, overrides=MIXED)
    damaged, message = DAMAGES[damage]
    damaged(broken.tensors)
    with pytest.raises(ArtifactError, match=message):
        harness.stage(broken)
    assert tokens_of(harness.generate(asked)) == tokens_of(was_b)
    harness.do(harness.core.rollback)
    assert tokens_of(harness.generate(asked)) == tokens_of(was_a)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({LAYER: "bf16"}, "fused layers must share one scheme"),
        ({LAYER: "int4"}, "fused layers must share one scheme"),
        ({"model.layers.7.mlp.up_proj": "bf16"}, "no such linear layer"),
    ],
)
def test_manifests_that_do_not_fit(
    harness: Harness, state: Tensors, layers: dict[str, str], message: str
) -> None:
    good = artifact_of(changed(state, 3), 3)
    bad = QuantizedArtifact.build(
        policy_version=3,
        model="test",
        layers={**good.manifest.layers, **layers},
        tensors=good.tensors,
    )
    with pytest.raises(ArtifactError, match=message):
        harness.stage(bad)


def test_order_of_operations_is_enforced(harness: Harness, state: Tensors) -> None:
    """Commit needs a complete stage, rollback a version that served, discard keeps such a one."""
    a, b = artifact_of(changed(state, 1), 1), artifact_of(changed(state, 2), 2)
    harness.publish(a)
    harness.stage(b)
    with pytest.raises(SlotStateError, match="cannot roll back"):
        harness.do(harness.core.rollback)
    with pytest.raises(SlotStateError, match="cannot commit"):
        harness.commit(a)
    assert harness.do(harness.core.discard) is True
    assert harness.do(harness.core.discard) is False
    for refused in (lambda: harness.commit(b), lambda: harness.probe([ProbeSequence([1, 2], 1)])):
        with pytest.raises(SlotStateError):
            refused()
    harness.publish(b)
    assert harness.do(harness.core.discard) is False, "a version to roll back to is no candidate"
    harness.publish(a)
    harness.do(harness.core.rollback)
    with pytest.raises(SlotStateError, match="cannot roll back"):
        harness.do(harness.core.rollback)
    assert harness.commit(a).policy_version == 1


def test_draining_sequences_move_to_the_live_slot_past_the_deadline(
    harness: Harness, state: Tensors
) -> None:
    """Their callers just wait a little longer and get the newer version, all of it."""
    a, b, c = (artifact_of(changed(state, seed), seed) for seed in (1, 2, 3))
    harness.publish(a)
    asked = prompts(4, seed=8)
    running = harness.start(asked, max_tokens=200)
    harness.publish(b)
    report = harness.stage(c, drain_deadline_s=0.05)
    assert report.resubmitted == 4
    assert report.drain_s >= 0.05
    moved = [future.result(60) for future in running]
    assert {(s.policy_version, s.resubmitted, len(s.token_ids)) for s in moved} == {(2, 1, 200)}
    harness.commit(c)
    harness.do(harness.core.rollback)
    short = harness.generate(asked, max_tokens=20)
    assert [s.token_ids for s in short] == [s.token_ids[:20] for s in moved]


def test_staging_waits_for_the_last_sequence(harness: Harness, state: Tensors) -> None:
    a, b, c = (artifact_of(changed(state, seed), seed) for seed in (1, 2, 3))
    harness.publish(a)
    running = harness.start(prompts(2, seed=9), max_tokens=60)
    harness.publish(b)
    staging = harness.stage_future(c)
    with pytest.raises(SlotStateError, match="another artifact is being staged"):
        harness.stage(c)
    report = staging.result(60)
    assert all(future.done() for future in running)
    assert {future.result().policy_version for future in running} == {1}
    assert report.resubmitted == 0


def test_discard_ends_a_stage_that_waits(harness: Harness, state: Tensors) -> None:
    a, b, c = (artifact_of(changed(state, seed), seed) for seed in (1, 2, 3))
    harness.publish(a)
    running = harness.start(prompts(2, seed=9), max_tokens=100)
    harness.publish(b)
    staging = harness.stage_future(c)
    assert harness.do(lambda: harness.thread.cancel_job(staging))
    assert {future.result(60).policy_version for future in running} == {1}
    assert harness.do(harness.core.rollback).policy_version == 1


def test_both_lanes_take_turns(harness: Harness, state: Tensors) -> None:
    """While both have work, steps strictly alternate."""
    a, b = artifact_of(changed(state, 1), 1), artifact_of(changed(state, 2), 2)
    harness.publish(a)
    order: list[int] = []
    step = harness.core.step

    def watched() -> None:
        both = all(harness.core.scheduler.lane_counts)
        step()
        if both:
            order.append(harness.core.scheduler.step_slot)

    harness.core.step = watched  # type: ignore[method-assign]
    old = harness.start(prompts(4), max_tokens=60)
    harness.publish(b)
    new = harness.start(prompts(4), max_tokens=40)
    for future in old + new:
        future.result(60)
    harness.core.step = step  # type: ignore[method-assign]
    assert len(order) > 20
    assert all(x != y for x, y in itertools.pairwise(order))


def test_aborts_leave_nothing_behind(harness: Harness, state: Tensors) -> None:
    """In both lanes, running and waiting."""
    harness.publish(artifact_of(changed(state, 1), 1))
    old = harness.start(prompts(40), max_tokens=200)
    harness.publish(artifact_of(changed(state, 2), 2))
    new = harness.start(prompts(40), max_tokens=200)
    time.sleep(0.05)
    core = harness.core
    harness.do(lambda: core.abort(list(core._pending)))
    assert all(future.cancelled() for future in old + new)
    assert core.scheduler.lane_counts == [0, 0]
    assert not core.has_work()
    assert core.scheduler.running == []
    assert len(core.scheduler.waiting) == 0
    assert core.scheduler.kv_cache_manager.usage == 0
    assert len(harness.generate(prompts(2))) == 2


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "empty"),
        (list(range(256)), {}, "max_model_len"),
        ([1, 10_000], {}, "token id 10000"),
        ([-1, 2], {}, "token id -1"),
        ([1], {"allowed_token_ids": [10_000]}, "allowed_token_ids"),
    ],
)
def test_wrong_requests_are_refused(
    harness: Harness, prompt: list[int], params: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        harness.start([prompt], **params)
    assert not harness.core.has_work()


@pytest.mark.parametrize("tokens", [[1, 2, 10_000], [10_000, 1, 2], list(range(300))])
def test_wrong_probes_are_refused(harness: Harness, state: Tensors, tokens: list[int]) -> None:
    harness.stage(artifact_of(changed(state, 2), 2))
    with pytest.raises(RequestError):
        harness.probe([ProbeSequence(tokens, 1)])
    assert harness.core.probing == 0
    harness.do(harness.core.discard)


def transformers_hidden(directory: Path, tensors: Tensors, tokens: list[int]) -> torch.Tensor:
    """Final-normed hidden states [len(tokens), H] of a transformers model with these weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    with torch.no_grad():
        return model.model(torch.tensor([tokens])).last_hidden_state[0]


@pytest.mark.parametrize("live_load", [False, True])
def test_probe_agrees_with_transformers(
    harness: Harness, directory: Path, state: Tensors, live_load: bool
) -> None:
    """A bf16 candidate scores like transformers in fp32; chunked next to live work as well."""
    harness.publish(artifact_of(changed(state, 1), 1))
    weights = changed(state, 4)
    harness.stage(artifact_of(weights, 4, default="bf16"))
    sequences = []
    for index, prompt in enumerate(prompts(3, seed=11)):
        tokens = prompt + prompts(1, seed=20 + index)[0]
        hidden = transformers_hidden(directory, weights, tokens)[len(prompt) - 1 : -1]
        sequences.append(ProbeSequence(tokens, len(prompt), hidden))
    harness.core.scheduler.idle_lane_tokens = 7
    running = harness.start(prompts(8), max_tokens=80) if live_load else []
    scores = harness.probe(sequences)
    for future in running:
        future.result(60)
    kl = torch.cat([score.kl for score in scores])
    difference = torch.cat([score.logprobs - score.reference_logprobs for score in scores])
    assert float(kl.min()) > -1e-5
    assert float(kl.mean()) < 0.01
    assert float(difference.abs().mean()) < 0.1
    harness.do(harness.core.discard)


def test_probe_sees_a_damaged_candidate(harness: Harness, state: Tensors) -> None:
    """Wrong scales that are consistent in themselves: only the probe can tell."""
    weights = changed(state, 5)
    asked = prompts(3, seed=12)
    tokens = [p + p[::-1] for p in asked]
    harness.publish(artifact_of(changed(state, 1), 1))
    sequences = [ProbeSequence(t, len(p)) for t, p in zip(tokens, asked, strict=True)]
    harness.stage(artifact_of(weights, 5, default="bf16"))
    exact = harness.probe(sequences)
    harness.stage(artifact_of(weights, 6))
    good = harness.probe(sequences)
    broken = artifact_of(weights, 7)
    for name, tensor in broken.tensors.items():
        if name.endswith("weight_scale"):
            tensor[::2] *= 8
    harness.stage(broken)
    bad = harness.probe(sequences)

    def distance(scores: list[Any]) -> float:
        pairs = zip(exact, scores, strict=True)
        return sum(float((x.logprobs - y.logprobs).abs().mean()) for x, y in pairs)

    assert distance(bad) > 5 * distance(good)
    harness.do(harness.core.discard)


def test_probes_leave_the_prefix_cache_alone(harness: Harness, state: Tensors) -> None:
    """A live request after a probe of the same tokens computes what it did before."""
    harness.publish(artifact_of(changed(state, 1), 1))
    asked = prompts(4, length=40, seed=13)
    before = harness.generate(asked)
    cached = harness.generate(asked)
    harness.stage(artifact_of(changed(state, 2), 2))
    first = harness.probe([ProbeSequence(p, 1) for p in asked])
    second = harness.probe([ProbeSequence(p, 1) for p in asked])
    assert all(torch.equal(x.logprobs, y.logprobs) for x, y in zip(first, second, strict=True))
    assert tokens_of(harness.generate(asked)) == tokens_of(cached)
    assert [s.token_ids for s in before] == [s.token_ids for s in cached]
    harness.do(harness.core.discard)
