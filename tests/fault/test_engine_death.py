"""An engine that dies within a live process: the process ends and the service replaces it."""

from __future__ import annotations

import asyncio

import pytest

from forge_ptq import runtime
from tests.fault.engine_actors import BreakableGenerator
from tests.loop import make_policy

pytestmark = pytest.mark.timeout(240)

ENGINE = {"max_model_len": 128, "max_num_seqs": 8, "kv_cache_memory_bytes": 32 << 20}


async def test_a_dead_engine_is_replaced_and_no_request_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_PTQ_LOG_DIR", str(tmp_path))
    await runtime.init_provisioner()
    try:
        policy = await BreakableGenerator.options(
            mesh_name="policy", env={"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        ).as_service(
            engine_args={"model": str(make_policy(tmp_path / "hf")), **ENGINE},
            sampling_params={"max_tokens": 4},
        )
        assert len(await policy.generate.route([1, 2])) == 1
        (before,) = await runtime.pids(policy)
        await policy.break_engine.route()
        # The requests that it dies under are served by its successor.
        calls = [asyncio.wait_for(policy.generate.route([1, 2, i]), 120) for i in range(3)]
        for (completion,) in await asyncio.gather(*calls):
            assert len(completion.token_ids) > 0
        assert completion.generator_version == 0
        assert await runtime.pids(policy) != [before]
        log = "".join(path.read_text() for path in tmp_path.glob("policy*.log"))
        assert "the engine died, so this process ends" in log
        assert "ArithmeticError: device error" in log
    finally:
        await runtime.shutdown()
