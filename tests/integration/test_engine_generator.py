"""QuantizedGenerator as an actor: real Monarch, TorchStore and vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from forge_ptq import runtime, store
from forge_ptq.artifact import ArtifactError
from forge_ptq.engine.generator import QuantizedGenerator
from forge_ptq.engine.types import ProbeSequence
from tests.integration.engine_support import artifact_of, changed, hf_state
from tests.loop import make_policy

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE = {"max_model_len": 256, "max_num_seqs": 32, "kv_cache_memory_bytes": 64 << 20}
SAMPLING = {"max_tokens": 8, "temperature": 1.0, "seed": 5}
ENV = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy") / "hf")


async def spawn(model: Path, **kwargs: Any) -> Any:
    options = QuantizedGenerator.options(procs=1, env=ENV, mesh_name=kwargs.pop("name", "gen"))
    return await options.as_actor(
        engine_args={"model": str(model), **ENGINE}, sampling_params=SAMPLING, **kwargs
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def policy(model: Path) -> Any:
    """Started before there is a store; the tests share it, in order."""
    await runtime.init_provisioner()
    actor = await spawn(model)
    version = await actor.get_version.call_one()
    assert version == 0, "without a store the checkpoint is served"
    await store.initialize()
    yield actor
    await store.shutdown()
    await runtime.shutdown()


async def test_text_in_completions_out(policy: Any) -> None:
    completions = await policy.generate.call_one("1 + 2 =", sampling_params={"n": 3})
    assert len(completions) == 3
    for completion in completions:
        assert completion.prompt == "1 + 2 ="
        assert isinstance(completion.text, str)
        assert completion.token_ids.dtype == torch.int64
        assert completion.logprobs.dtype == torch.float32
        assert len(completion.logprobs) == len(completion.token_ids) <= 8
        assert bool((completion.logprobs <= 0).all())
        assert completion.stop_reason in ("stop", "length")
        assert completion.generator_version == 0
        assert completion.metadata["scheme"] == "bf16"
    ids = [completion.token_ids.tolist() for completion in completions]
    assert len({tuple(i) for i in ids}) > 1, "the samples of one seed must differ"
    again = await policy.generate.call_one("1 + 2 =", sampling_params={"n": 3})
    assert [completion.token_ids.tolist() for completion in again] == ids


async def test_calls_share_engine_steps(policy: Any) -> None:
    """Sixteen callers are batched: far fewer steps than one after the other would take."""
    before = (await policy.describe.call_one())["steps"]
    params = {"max_tokens": 40, "ignore_eos": True}
    calls = [policy.generate.call_one([1, 2, 3, i], sampling_params=params) for i in range(16)]
    results = await asyncio.gather(*calls)
    assert all(len(one) == 1 and len(one[0].token_ids) == 40 for one in results)
    assert (await policy.describe.call_one())["steps"] - before < 16 * 40 / 4


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "empty"),
        ([1] * 300, {}, "max_model_len"),
        ([99_999], {}, "token id 99999"),
        ([1], {"n": 0}, "sampling_params.n"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"temprature": 1.0}, "temprature"),
    ],
)
async def test_wrong_requests_name_what_is_wrong(
    policy: Any, prompt: list[int], params: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        await policy.generate.call_one(prompt, sampling_params=params)
    assert len(await policy.generate.call_one([1])) == 1


async def test_stage_probe_commit_rollback(policy: Any, model: Path) -> None:
    weights = changed(hf_state(model), 1)
    artifact = artifact_of(weights, 7)
    ref = await store.put_artifact(artifact)
    staged = await policy.stage.call_one(ref)
    assert staged.policy_version == 7
    assert staged.bytes == artifact.manifest.nbytes
    description = await policy.describe.call_one()
    idle = description["slots"][1 - description["live"]]
    assert idle["artifact_id"] == ref.artifact_id
    assert idle["layers"] == dict(artifact.manifest.layers)
    scores = await policy.probe.call_one([ProbeSequence([1, 2, 3, 4, 5], 2)])
    assert scores[0].logprobs.shape == (3,)
    assert await policy.get_version.call_one() == 0
    report = await policy.commit.call_one(ref.artifact_id)
    assert report.flip_s < 0.1
    (completion,) = await policy.generate.call_one([1, 2])
    assert completion.generator_version == 7
    assert completion.metadata["artifact_id"] == ref.artifact_id
    assert completion.metadata["scheme"] == "int8_dynamic"
    await policy.rollback.call_one()
    assert await policy.get_version.call_one() == 0


async def test_discard_ends_a_probe_and_frees_the_slot(policy: Any, model: Path) -> None:
    """A caller whose deadline has passed leaves a probe running; the next stage must work."""
    refs = []
    for seed in (8, 9):
        artifact = artifact_of(changed(hf_state(model), seed), seed)
        refs.append(await store.put_artifact(artifact))
    await policy.stage.call_one(refs[0])
    many = [ProbeSequence([1 + i % 50] * 200, 100) for i in range(400)]
    probe = asyncio.ensure_future(policy.probe.call_one(many))
    async with asyncio.timeout(60):
        while not (await policy.describe.call_one())["probing"]:
            assert not probe.done()
    with pytest.raises(Exception, match="being probed"):
        await policy.stage.call_one(refs[1])
    assert await policy.discard.call_one()
    with pytest.raises(Exception, match="discarded before it was done"):
        await asyncio.wait_for(probe, 60)
    staged = await policy.stage.call_one(refs[1])
    assert staged.policy_version == 9
    assert (await policy.probe.call_one([ProbeSequence([1, 2, 3], 1)]))[0].logprobs.shape == (2,)
    assert await policy.discard.call_one()
    assert not await policy.discard.call_one()
    for ref in refs:
        await store.drop_artifact(ref)


async def test_refused_artifacts_change_nothing(policy: Any, model: Path) -> None:
    """One that does not fit, one that is not there."""
    state = hf_state(model)
    before = await policy.describe.call_one()
    unfit = artifact_of({n: t for n, t in state.items() if n != "model.norm.weight"}, 8)
    ref = await store.put_artifact(unfit)
    with pytest.raises(Exception, match=r"model\.norm\.weight: missing"):
        await policy.stage.call_one(ref)
    await store.drop_artifact(ref)
    with pytest.raises(Exception, match=ref.artifact_id):
        await policy.stage.call_one(ref)
    with pytest.raises(Exception, match="cannot commit"):
        await policy.commit.call_one(ref.artifact_id)
    after = await policy.describe.call_one()
    assert after["slots"] == before["slots"]
    assert issubclass(ArtifactError, ValueError)


async def test_update_weights_alone(policy: Any, model: Path) -> None:
    """Forge's own way: pushed bf16 weights, quantized here."""
    weights = changed(hf_state(model), 2)
    await store.put_weights(11, weights)
    assert await policy.update_weights.call_one(11) == 11
    assert await policy.get_version.call_one() == 11
    (got,) = await policy.generate.call_one([4, 5, 6])
    assert got.generator_version == 11
    assert got.metadata["scheme"] == "int8_dynamic"
    first = await store.get_committed()
    assert first is not None
    assert first.artifact_id == got.metadata["artifact_id"], "what a respawned one would serve"
    await store.put_weights(12, changed(hf_state(model), 4))
    await policy.update_weights.call_one(12)
    second = await store.get_committed()
    assert second is not None
    assert second.policy_version == 12
    assert (await store.get_artifact(second)).manifest.policy_version == 12
    assert first.artifact_id not in await store.artifact_ids()
    with pytest.raises(Exception, match="policy_ver_0000000404"):
        await policy.update_weights.call_one(404)
    assert await policy.get_version.call_one() == 12
    assert await store.get_committed() == second


async def test_a_new_process_serves_what_is_committed(policy: Any, model: Path) -> None:
    """The respawn path; and a request past its deadline is aborted, the engine goes on."""
    weights = changed(hf_state(model), 3)
    ref = await store.put_artifact(artifact_of(weights, 13))
    await store.set_committed(ref)
    other = await spawn(model, request_timeout_s=3.0, plan={"default": "bf16"}, name="gen2")
    assert await other.get_version.call_one() == 13
    await policy.stage.call_one(ref)
    await policy.commit.call_one(ref.artifact_id)
    params = {"n": 2, "temperature": 0.0, "ignore_eos": True}
    pair = [await a.generate.call_one([7, 8], sampling_params=params) for a in (policy, other)]
    assert [c.token_ids.tolist() for c in pair[0]] == [c.token_ids.tolist() for c in pair[1]]
    slow = {"max_tokens": 250, "n": 400, "ignore_eos": True}
    with pytest.raises(Exception, match="request_timeout_s"):
        await other.generate.call_one([1, 2], sampling_params=slow)
    assert sum(s["sequences"] for s in (await other.describe.call_one())["slots"]) == 0
    await store.put_weights(14, changed(hf_state(model), 5))
    await other.update_weights.call_one(14)
    (got,) = await other.generate.call_one([4, 5, 6])
    assert (got.generator_version, got.metadata["scheme"]) == (14, "bf16")
    assert (await store.get_committed()).artifact_id == got.metadata["artifact_id"]  # type: ignore[union-attr]
    await QuantizedGenerator.shutdown(other)
