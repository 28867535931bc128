"""Publishing for real: vLLM generator, two Quantizer replicas, merger, coordinator and store, each
in processes of its own, on a tiny tied Llama.

The tests build on each other: each starts from what the one before left serving.
tests/fault/test_publish_kills.py kills the same processes.
"""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from forge_ptq import store
from forge_ptq.artifact import ArtifactRef
from forge_ptq.mismatch import SequenceMismatch, as_rows, sequence_rows
from tests.integration.ptq_support import policy_state
from tests.integration.publish_loop import GREEDY, running_loop

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def loop(tmp_path_factory):
    inject = [
        SimpleNamespace(step=2, fault="corrupt_scales", attempts=1),
        SimpleNamespace(step=5, fault="corrupt_scales", attempts=1),
        SimpleNamespace(step=6, fault="corrupt_scales", attempts=2),
        SimpleNamespace(step=8, fault="damage_live", attempts=1),
    ]
    async with running_loop(tmp_path_factory.mktemp("policy"), inject) as started:
        started.ptq.cfg.guard.on_reject = ["keep"]
        yield started


async def test_accepted(loop):
    completions = await loop.offer(groups=24, seed=0)
    assert {c.generator_version for c in completions} == {0}
    await loop.push(1)
    verdict = await loop.ptq.publish(1)
    assert verdict.outcome == "accepted", verdict.reason
    assert verdict.scheme == "bf16:2 int8_dynamic:10 int8_static:2"
    assert (verdict.calibrated, verdict.calibration_reason) == (True, "first")
    assert verdict.calibration_tokens == 16 * (6 + 16)
    assert 1 <= len(verdict.contributors) <= 2
    assert verdict.dropped == ()
    assert sum(verdict.flop_share.values()) == pytest.approx(1.0)
    # Of a layer's weights: q, o 64 x 64, k, v 32 x 64, gate, up, down 128 x 64.
    assert verdict.flop_share["int8_static"] == pytest.approx(1 / 9)
    assert 0 <= verdict.drift_clipped_fraction < 1
    assert verdict.drift_layer.endswith("o_proj")
    assert 0 < verdict.kl < 0.03
    assert verdict.ci[0] <= verdict.perplexity_rise <= verdict.ci[1]
    assert verdict.probe_sequences == 16
    assert verdict.probe_tokens == 16 * 16
    assert verdict.bytes > 0
    assert await loop.policy.get_version.route() == 1
    assert {entry[2:] for entry in await loop.greedy()} == {(1, verdict.artifact_id)}
    assert await store.get_committed() == ArtifactRef(verdict.artifact_id, verdict.version)


async def test_a_corrupted_candidate_never_serves_a_token(loop):
    before = await loop.greedy()
    await loop.push(2)
    seen: list[Any] = []

    async def traffic() -> None:
        for seed in range(1, 1000):
            seen.extend(await loop.offer(groups=2, seed=seed))

    running = asyncio.create_task(traffic())
    verdict = await loop.ptq.publish(2)
    running.cancel()
    await asyncio.wait({running})
    assert (verdict.outcome, verdict.refused) == ("kept", True)
    assert verdict.perplexity_rise > 0.03
    assert "limit 3.00%" in verdict.reason
    assert seen
    assert {c.generator_version for c in seen} == {1}
    assert {c.metadata["artifact_id"] for c in seen} == {before[0][3]}
    assert await loop.greedy() == before
    committed = await store.get_committed()
    assert committed is not None
    assert committed.policy_version == 1
    slots = (await loop.policy.describe.route())["slots"]
    assert verdict.artifact_id not in [slot["artifact_id"] for slot in slots]


async def test_refused_it_serves_the_same_version_in_bf16(loop):
    await loop.push(3)
    loop.ptq.cfg.guard.on_reject = ["bf16"]
    loop.ptq.faults.inject[0].step = 3
    try:
        verdict = await loop.ptq.publish(3)
    finally:
        loop.ptq.cfg.guard.on_reject = ["keep"]
    assert (verdict.outcome, verdict.refused) == ("fell_back", True), verdict.reason
    assert verdict.perplexity_rise > 0.03
    assert {entry[2:] for entry in await loop.greedy()} == {(3, verdict.artifact_id)}
    (completion,) = await loop.policy.generate.route([1, 2], sampling_params=GREEDY)
    assert completion.metadata["scheme"] == "bf16"


async def test_the_next_good_version_is_quantized_again(loop):
    await loop.push(4)
    verdict = await loop.ptq.publish(4)
    assert verdict.outcome == "accepted", verdict.reason
    assert await loop.policy.get_version.route() == 4


def mismatch(path: Any, version: int, completions: list[Any]) -> list[SequenceMismatch]:
    """What a trainer of this version says of the completions, from transformers' logprobs."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.load_state_dict(policy_state(path, step=version), strict=False)
    records = []
    for completion in completions:
        start = len(completion.prompt_ids)
        tokens = torch.cat([completion.prompt_ids, completion.token_ids])[None]
        with torch.no_grad():
            logits = model(tokens).logits[0, start - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(1, completion.token_ids[:, None])[:, 0]
        gap = (chosen - completion.logprobs)[None]
        every, none = torch.ones_like(gap, dtype=torch.bool), torch.zeros_like(gap) > 0
        (row,) = as_rows(sequence_rows(gap, every, every, none, none, none))
        records.append(
            SequenceMismatch(
                artifact_id=completion.metadata["artifact_id"],
                scheme=completion.metadata["scheme"],
                policy_version=completion.generator_version,
                age=1,
                tokens=int(row["tokens"]),
                k1_sum=row["k1_sum"],
                k3_sum=row["k3_sum"],
                ratio_sum=row["ratio_sum"],
                ratio_sq_sum=row["ratio_sq_sum"],
                max_abs_gap=row["max_abs_gap"],
                reward=0.0,
                group="g",
            )
        )
    return records


async def test_demoted_then_in_bf16_then_rolled_back_then_recovering(loop):
    """5 is demoted, 6 falls back, 8 is damaged while it serves and rolled back exactly to 7, 9
    comes with one demotion more, and two good publishes later it is taken back, beside a companion.
    """
    ptq, guard = loop.ptq, loop.ptq.cfg.guard
    guard.on_reject, guard.demote_attempts = ["demote", "bf16", "keep"], 1
    guard.probation.episodes, guard.probation.patience = 16, 1
    ptq.ladder.recover_after, ptq.sampler.max_age = 2, 100

    async def publish(version: int) -> Any:
        await loop.push(version)
        verdict = await ptq.publish(version)
        served = (version, verdict.artifact_id)
        assert {entry[2:] for entry in await loop.greedy()} == {served}, verdict.reason
        flips.append(verdict.code_flip_fraction)
        return verdict

    flips: list[float | None] = []
    fifth = await publish(5)
    assert (fifth.outcome, fifth.refused, fifth.level) == ("demoted", True, 1), fifth.reason
    manifest = await store.get_manifest(ArtifactRef(fifth.artifact_id, 5))
    demoted = {n for n, note in manifest.notes.items() if note.endswith("demoted")}
    assert demoted
    assert demoted == {n for n, s in manifest.layers.items() if s != manifest.asked[n]}
    assert 0.15 <= fifth.demoted_share < 0.5
    assert set(manifest.weight_error) == {n for n, s in manifest.layers.items() if s != "bf16"}
    assert 0 < fifth.weight_error < 0.02
    sixth = await publish(6)
    assert (sixth.outcome, sixth.attempts, sixth.level) == ("fell_back", 3, 2), sixth.reason
    seventh = await publish(7)
    assert (seventh.outcome, seventh.attempts) == ("demoted", 1), seventh.reason

    good = mismatch(loop.path, 7, await loop.offer(groups=8, seed=70))
    assert await ptq.watch(8, good, oldest_usable=7) is None
    assert ptq.serving.current.confirmed, ptq.state()
    before = await loop.greedy()
    await loop.push(8)
    eighth = await ptq.publish(8)
    assert eighth.outcome == "demoted", eighth.reason
    damaged = await loop.offer(groups=8, seed=80)
    rollback = await ptq.watch(9, mismatch(loop.path, 8, damaged), oldest_usable=7)
    assert rollback is not None, ptq.state()
    assert (rollback.version_from, rollback.version_to) == (8, 7)
    assert (rollback.exact, rollback.behind) == (True, 0)
    assert rollback.artifact_to == seventh.artifact_id
    assert await loop.greedy() == before, "bit for bit what served before"
    assert await store.get_committed() == ArtifactRef(seventh.artifact_id, 7)
    assert eighth.artifact_id not in await store.artifact_ids()

    ninth = await publish(9)
    assert (ninth.outcome, ninth.demotions, ninth.level) == ("demoted", 1, 3), ninth.reason
    verdicts = [await publish(version) for version in (10, 11)]
    good = mismatch(loop.path, 11, await loop.offer(groups=8, seed=110))
    assert await ptq.watch(12, good, oldest_usable=11) is None
    before = await loop.greedy()
    ptq.cfg.ab.enabled = True  # the idle slot then holds the companion, not the version before
    verdicts.append(await publish(12))
    assert [(v.promoted, v.level) for v in verdicts] == [(False, 3), (False, 3), (True, 2)]
    companion = await asyncio.wait_for(ptq.accompanied(), 120)
    assert companion is not None
    slots = (await loop.policy.describe.route())["slots"]
    companions = [slot["artifact_id"] for slot in slots if slot["role"] == "companion"]
    assert companions == [companion.artifact_id]
    worse = [replace(r, artifact_id=verdicts[-1].artifact_id, k3_sum=1.0 * r.tokens) for r in good]
    rollback = await ptq.watch(13, worse, oldest_usable=11)
    assert rollback is not None
    assert (rollback.artifact_to, rollback.exact) == (verdicts[-2].artifact_id, True)
    assert await loop.greedy() == before, "staged again from the store"
    # None where each of the two replicas got the other's layers: not three times in a row.
    known = [flip for flip in flips if flip is not None]
    assert known
    assert all(0 < flip < 1 for flip in known)
