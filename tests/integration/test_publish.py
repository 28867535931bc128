"""Publishing for real: vLLM generator, two Quantizer replicas, merger, coordinator and store, each
in processes of its own, on a tiny tied Llama.

The tests build on each other: each starts from what the one before left serving.
"""

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import torch

from forge_ptq import runtime, store
from forge_ptq.artifact import ArtifactRef
from forge_ptq.config import PlanConfig, PTQConfig
from forge_ptq.engine.generator import QuantizedGenerator
from forge_ptq.services.ptq import PTQ
from forge_ptq.services.quantizer import Quantizer
from tests.integration.ptq_support import VOCAB, policy_state, save_policy

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

PLAN: dict[str, Any] = {
    "default": "int8_dynamic",
    "overrides": {"*.o_proj": "int8_static", "*.down_proj": "bf16"},
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
GREEDY = {"temperature": 0.0, "max_tokens": 12, "n": 1}


class Loop:
    """Handles of one small run and what a test does with them."""

    def __init__(self, path: Any, policy: Any, quantizer: Any, ptq: PTQ) -> None:
        self.path, self.policy, self.quantizer, self.ptq = path, policy, quantizer, ptq

    async def offer(self, groups: int, seed: int) -> list[Any]:
        """Sample groups of 2 rollouts and offer them; returns the completions."""
        generator = torch.Generator().manual_seed(seed)
        prompts = torch.randint(0, VOCAB, (groups, 6), generator=generator).tolist()
        sampled = await asyncio.gather(*(self.policy.generate.route(p) for p in prompts))
        completions = [completion for group in sampled for completion in group]
        await self.ptq.offer(
            SimpleNamespace(completion=c, reward=0.0, policy_version=c.generator_version)
            for c in completions
        )
        return completions

    async def push(self, version: int) -> None:
        await store.put_weights(version, policy_state(self.path, step=version))

    async def greedy(self) -> list[tuple[list[int], list[float], int, str]]:
        """Greedy tokens, logprobs, version and artifact for fixed prompts."""
        prompts = [[5, 6, 7], [100, 3], list(range(20))]
        out = await asyncio.gather(
            *(self.policy.generate.route(p, sampling_params=GREEDY) for p in prompts)
        )
        return [
            (
                c.token_ids.tolist(),
                c.logprobs.tolist(),
                c.generator_version,
                c.metadata["artifact_id"],
            )
            for (c,) in out
        ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def loop(tmp_path_factory):
    path = save_policy(tmp_path_factory.mktemp("policy"), "llama")
    await runtime.init_provisioner()
    await store.initialize()
    policy, quantizer = await asyncio.gather(
        QuantizedGenerator.options(mesh_name="policy", env=ONE_THREAD).as_service(
            engine_args={
                "model": str(path),
                "skip_tokenizer_init": True,
                "max_model_len": 128,
                "max_num_seqs": 16,
                "enforce_eager": True,
            },
            sampling_params={"n": 2, "max_tokens": 16, "temperature": 1.0, "seed": 1},
        ),
        Quantizer.options(num_replicas=2, mesh_name="quantizer", env=ONE_THREAD).as_service(
            model_path=str(path), plan=PLAN
        ),
    )
    cfg = PTQConfig()
    cfg.plan = PlanConfig(**PLAN)
    cfg.calibration.rollouts, cfg.calibration.batch_tokens = 16, 64
    cfg.drift.enabled = False  # random weights, few tokens
    cfg.probe.sequences, cfg.probe.min_sequences, cfg.sampler.probe_fraction = 16, 8, 0.5
    ptq = await PTQ.launch(
        cfg,
        policy=policy,
        quantizer=quantizer,
        inject=[SimpleNamespace(step=2, fault="corrupt_scales")],
    )
    yield Loop(path, policy, quantizer, ptq)
    await ptq.close()
    await store.shutdown()
    await runtime.shutdown()


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
    loop.ptq._inject[0].step = 3
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


async def kill_in(loop, monkeypatch, phase: str, handle: Any) -> int:
    """Arrange that the first process behind handle is killed when the next publish enters phase."""
    pid = (await runtime.pids(handle))[0]
    original = getattr(loop.ptq._publisher, phase)

    async def killing(*args: Any) -> None:
        os.kill(pid, signal.SIGKILL)
        monkeypatch.undo()
        await original(*args)

    monkeypatch.setattr(loop.ptq._publisher, phase, killing)
    return pid


@pytest.mark.parametrize(("version", "phase"), [(5, "quantize"), (6, "probe")])
async def test_a_quantizer_that_is_killed_is_made_up_for(loop, monkeypatch, version, phase):
    await loop.push(version)
    pid = await kill_in(loop, monkeypatch, phase, loop.quantizer)
    verdict = await loop.ptq.publish(version)
    assert verdict.outcome == "accepted", verdict.reason
    assert verdict.calibration_round == 1  # the scales outlive who measured them
    assert not verdict.calibrated
    assert {entry[2:] for entry in await loop.greedy()} == {(version, verdict.artifact_id)}
    assert pid not in await runtime.pids(loop.quantizer)


async def test_generator_killed_in_the_middle_comes_back_with_what_was_committed(loop, monkeypatch):
    before = await loop.greedy()
    await loop.push(7)
    await kill_in(loop, monkeypatch, "probe", loop.policy)
    verdict = await loop.ptq.publish(7)
    assert verdict.outcome == "kept"
    assert await loop.greedy() == before
    await loop.push(8)
    assert (await loop.ptq.publish(8)).outcome == "accepted"


async def test_generator_killed_at_the_flip_comes_back_with_the_new_artifact(loop, monkeypatch):
    await loop.push(9)
    (pid,) = await runtime.pids(loop.policy)
    real = store.set_committed

    async def then_kill(ref: Any) -> None:
        await real(ref)
        os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(store, "set_committed", then_kill)
    verdict = await loop.ptq.publish(9)
    monkeypatch.undo()
    assert verdict.outcome == "accepted", verdict.reason
    assert {entry[2:] for entry in await loop.greedy()} == {(9, verdict.artifact_id)}
    assert await store.get_committed() == ArtifactRef(verdict.artifact_id, verdict.version)
