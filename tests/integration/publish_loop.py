"""One small run without a trainer, for tests that publish: real processes, a tiny tied Llama."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from forge_ptq import runtime, store
from forge_ptq.config import PlanConfig, PTQConfig
from forge_ptq.engine.generator import QuantizedGenerator
from forge_ptq.services.ptq import PTQ
from forge_ptq.services.quantizer import Quantizer
from tests.integration.ptq_support import VOCAB, policy_state, save_policy
from tests.integration.runtime_support import children

PLAN: dict[str, Any] = {
    "default": "int8_dynamic",
    "overrides": {"*.o_proj": "int8_static", "*.down_proj": "bf16"},
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
GREEDY = {"temperature": 0.0, "max_tokens": 12, "n": 1}


class Loop:
    """Handles of one small run and what a test does with them."""

    def __init__(self, path: Path, policy: Any, quantizer: Any, ptq: PTQ, store_pid: int) -> None:
        self.path, self.policy, self.quantizer, self.ptq = path, policy, quantizer, ptq
        self.store_pid = store_pid

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


@asynccontextmanager
async def running_loop(folder: Path, inject: Sequence[Any] = ()) -> AsyncIterator[Loop]:
    """Starts generator, two quantizers, merger, coordinator and store; ends them afterwards."""
    path = save_policy(folder, "llama")
    await runtime.init_provisioner()
    before = children()
    await store.initialize()
    (store_pid,) = children() - before
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
        inject=inject,
    )
    try:
        yield Loop(path, policy, quantizer, ptq, store_pid)
    finally:
        await ptq.close()
        await store.shutdown()
        await runtime.shutdown()
