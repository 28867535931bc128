"""Trainer and reference model as actors: one rank and two, weights through the real store."""

import asyncio
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from forge_ptq import runtime, store
from forge_ptq.config import LossConfig
from forge_ptq.loss import GRPOLoss, token_logprobs
from forge_ptq.training.backward import response_logits
from forge_ptq.training.engine import TrainEngine
from forge_ptq.training.reference_model import ReferenceModel
from forge_ptq.training.trainer import TitanTrainer
from tests.integration.trainer_support import REQUEST, RESPONSE, batch, config, save_policy

pytestmark = pytest.mark.asyncio(loop_scope="module")
ENV = {"OMP_NUM_THREADS": "1"}


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def running_store():
    await runtime.init_provisioner()
    await store.initialize()
    yield
    await store.shutdown()
    await runtime.shutdown()


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("policies")
    even = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {
        f"{kind}{name}": save_policy(root / f"{kind}{name}", kind, **heads)
        for kind in ("qwen3", "llama")
        for name, heads in (("", {}), ("_even", even))
    }


async def deadline(call, seconds: float = 90.0):
    return await asyncio.wait_for(call, seconds)


async def test_one_rank_trains_pushes_and_resumes(policies, tmp_path):
    trainer_config = config(policies["qwen3"], tmp_path)
    blocks = trainer_config.to_dict()
    options = TitanTrainer.options(procs=1, mesh_name="trainer", env=ENV)
    trainer, reference = await deadline(
        asyncio.gather(
            options.as_actor(**blocks, loss=LossConfig(beta=0.05, tis_cap=3.0, temperature=0.7)),
            ReferenceModel.options(procs=1, mesh_name="reference", env=ENV).as_service(
                **{k: blocks[k] for k in ("model", "training", "parallelism", "checkpoint")},
                temperature=0.7,
            ),
        )
    )
    try:
        inputs, targets = batch()
        tokens = inputs["tokens"]
        logprobs = await deadline(reference.forward.route(tokens, REQUEST, return_logprobs=True))
        explicit = await deadline(
            reference.forward.route(tokens, REQUEST, prompt_lens=inputs["prompt_lens"])
        )
        assert torch.equal(logprobs, explicit)  # the leading run of padding tells the lengths
        targets["ref_logprobs"] = targets["generator_logprobs"] = logprobs
        assert await deadline(trainer.resume_step.call_one()) == 0
        metrics = await deadline(trainer.train_step.call_one([inputs], [targets], {"position": 5}))
        # Reference and trainer hold the same weights, in two processes.
        assert metrics["kl_ref"] == pytest.approx(0, abs=1e-6)
        assert metrics["mismatch_k3"] == pytest.approx(0, abs=1e-6)
        assert metrics["skipped"] == 0

        twin = TrainEngine(
            config(policies["qwen3"]), GRPOLoss(beta=0.05, tis_cap=3.0, temperature=0.7)
        )
        twin.step([inputs], [targets])
        rows = await deadline(trainer.sequence_mismatch.call_one())
        assert [r["tokens"] for r in rows] == targets["padding_mask"].sum(1).tolist()
        await deadline(trainer.push_weights.call(1))
        got, expected = await deadline(store.get_weights(1)), twin.full_hf_state()
        assert set(got) == set(expected)
        assert "lm_head.weight" not in got  # tied
        for name, tensor in expected.items():
            assert got[name].dtype == torch.bfloat16
            torch.testing.assert_close(got[name], tensor, atol=1e-3, rtol=1e-2)

        await deadline(TitanTrainer.shutdown(trainer))
        trainer = await deadline(options.as_actor(**blocks, loss={"beta": 0.05, "tis_cap": 3.0}))
        assert await deadline(trainer.sequence_mismatch.call_one()) == []
        assert await deadline(trainer.resume_step.call_one()) == 1
        assert await deadline(trainer.resume_extra.call_one()) == {"position": 5}
        await deadline(trainer.push_weights.call(2))
        again = await deadline(store.get_weights(2))
        assert all(torch.equal(again[k], v) for k, v in got.items())
        await deadline(trainer.cleanup.call())
    finally:
        await deadline(TitanTrainer.shutdown(trainer))
        await deadline(reference.shutdown())


@pytest.mark.parametrize(
    ("kind", "version", "tensor_parallel"),
    [
        ("qwen3", 10, False),
        ("llama", 11, False),
        ("qwen3_even", 12, True),
        ("llama_even", 13, True),
    ],
)
async def test_two_ranks_train_as_one(policies, kind, version, tensor_parallel):
    """FSDP or tensor parallelism over gloo: same metrics and weights as one process on the whole
    batch, though with FSDP the ranks' shares are unequal and a correction leaves another number of
    tokens out on each."""
    trainer_config = config(policies[kind], local_batch_size=2)
    trainer_config.parallelism.tensor_parallel_degree = 2 if tensor_parallel else 1
    inputs, targets = batch(size=7)
    inputs |= {"schemes": [*["bf16", "int8_static"] * 3, "bf16"], "policy_versions": [0] * 6 + [-1]}
    loss = GRPOLoss(
        aggregation="token_mean", rollout_correction="icepop", icepop_low=0.6, icepop_high=1.8
    )
    twin = TrainEngine(config(policies[kind]), loss)
    with torch.no_grad():
        own = token_logprobs(
            response_logits(twin.built, inputs["tokens"], inputs["prompt_lens"], RESPONSE),
            targets["response"],
        )
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(3))
    targets["generator_logprobs"] = own + 0.5 * noise
    halves = [
        [{k: v[rows] for k, v in part.items()} for rows in (slice(0, 4), slice(4, 7))]
        for part in (inputs, targets)
    ]
    trainer = await deadline(
        TitanTrainer.options(procs=2, mesh_name=f"trainer2_{version}", env=ENV).as_actor(
            **trainer_config.to_dict(), loss=loss
        )
    )
    try:
        unequal = [[part[0], {k: v[:1] for k, v in part[1].items()}] for part in halves]
        message = r"\[2, 1\] micro-batches; expected as many on each"
        if tensor_parallel:
            message = "got 2 inputs and 2 targets; expected one of each"
        with pytest.raises(Exception, match=message):
            await deadline(trainer.train_step.call(*unequal))  # not a wait for each other
        shares = ([inputs], [targets]) if tensor_parallel else halves
        results = await deadline(trainer.train_step.call(*shares))
        per_rank = [metrics for _, metrics in results.items()]
        rows = [r for _, r in (await deadline(trainer.sequence_mismatch.call())).items()]
        await deadline(trainer.push_weights.call(version))
        await deadline(trainer.cleanup.call())
    finally:
        await deadline(TitanTrainer.shutdown(trainer))
    alone = twin.step([inputs], [targets])
    assert 0.1 < alone["masked_fraction"] < 0.9
    assert "ess/int8_static" in alone
    compared = {k for k in alone if "/" not in k and k not in {"seconds", "learning_rate"}}
    for metrics in per_rank:
        assert set(metrics) >= compared
        for name in compared:
            assert metrics[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name
    for found in rows:  # in the order of the inputs, on every rank
        for row, one in zip(found, twin.sequences, strict=True):
            assert row == pytest.approx(one, rel=1e-4, abs=1e-5)
    got = await deadline(store.get_weights(version))
    expected = twin.full_hf_state()
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, atol=2e-3, rtol=2e-2)
