"""The Quantizer actor end to end: real processes, real store, tiny random policies."""

import asyncio
import time

import pytest
import pytest_asyncio
import torch

from forge_ptq import runtime, store
from forge_ptq.numerics.schemes import QuantizationError, get_scheme
from forge_ptq.services.quantizer import Quantizer
from forge_ptq.store import StoreError
from tests.integration.ptq_support import policy_state, random_rollouts, save_policy

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLAN = {
    "default": "int8_dynamic",
    "overrides": {"*.gate_proj": "int8_static", "*.up_proj": "int8_static", "*.down_proj": "bf16"},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def running_store():
    await runtime.init_provisioner()
    await store.initialize()
    yield
    await store.shutdown()
    await runtime.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def policy(tmp_path_factory):
    """(quantizer service, the state pushed as this version, the version)."""
    path = save_policy(tmp_path_factory.mktemp("policy"), "qwen3")
    version = 1
    state = policy_state(path, step=1)
    await store.put_weights(version, state)
    quantizer = await Quantizer.options(
        mesh_name="quantizer", env={"OMP_NUM_THREADS": "1"}
    ).as_service(model_path=str(path), plan=PLAN)
    yield quantizer, state, version
    await quantizer.shutdown()


async def test_pipeline(policy):
    quantizer, state, version = policy
    status = await quantizer.status.route()
    assert status.version is None
    assert status.needs_calibration
    with pytest.raises(ValueError, match="not loaded"):
        await quantizer.quantize.route(version)
    assert (await quantizer.load.route(version)).version == version
    with pytest.raises(ValueError, match="calibrate before quantize"):
        await quantizer.quantize.route(version)
    ranges = await quantizer.calibrate.route(version, random_rollouts(6))
    assert len(ranges) == 4
    ref = await quantizer.quantize.route(version)
    again = await quantizer.quantize.route(version)
    assert ref != again
    artifact, repeated = await store.get_artifact(ref), await store.get_artifact(again)
    assert artifact.manifest.tensors == repeated.manifest.tensors
    assert artifact.manifest.policy_version == version
    assert set(artifact.manifest.layers.values()) == {"int8_dynamic", "int8_static", "bf16"}
    for layer, scheme in artifact.manifest.layers.items():
        absmax = max(ranges.get(layer, 1.0), 1e-3)
        parts = get_scheme(scheme).quantize(state[f"{layer}.weight"], absmax=absmax)
        assert torch.equal(artifact.tensors[f"{layer}.weight"], parts["weight"])
    table = "model.embed_tokens.weight"
    assert torch.equal(artifact.tensors[table], state[table])


async def test_override_and_fault(policy):
    quantizer, state, version = policy
    await quantizer.load.route(version)
    await quantizer.calibrate.route(version, random_rollouts(4))
    plain = await store.get_artifact(await quantizer.quantize.route(version, "bf16"))
    assert set(plain.manifest.layers.values()) == {"bf16"}
    assert all(torch.equal(tensor, state[name]) for name, tensor in plain.tensors.items())
    faulty = await store.get_artifact(
        await quantizer.quantize.route(version, None, "corrupt_scales")
    )
    name = "model.layers.0.self_attn.q_proj"
    error = (
        get_scheme("int8_dynamic").dequantize(
            {part: faulty.tensors[f"{name}.{part}"] for part in ("weight", "weight_scale")}
        )
        - state[f"{name}.weight"].float()
    )
    assert float(error.abs().max()) > 0.05
    with pytest.raises(ValueError, match="corrupt_scales or None"):
        await quantizer.quantize.route(version, None, "gremlins")


async def test_reference_comes_from_the_asked_version_only(policy):
    quantizer, _, version = policy
    await quantizer.load.route(version)
    rollouts = random_rollouts(5)
    hidden = await quantizer.reference.route(version, rollouts)
    assert [h.shape[0] for h in hidden] == [len(r.token_ids) - r.response_start for r in rollouts]
    assert all(h.dtype == torch.float32 and h.shape[1] == 64 for h in hidden)
    with pytest.raises(ValueError, match=f"version {version + 1} is not loaded"):
        await quantizer.reference.route(version + 1, rollouts)


async def test_missing_and_unfit_versions_leave_the_loaded_one(policy):
    quantizer, state, version = policy
    await quantizer.load.route(version)
    with pytest.raises(StoreError, match="policy_ver_0000000777"):
        await quantizer.load.route(777)
    wrong = version + 5
    await store.put_weights(wrong, {**state, "model.norm.weight": torch.ones(3)})
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[3\]"):
        await quantizer.load.route(wrong)
    assert (await quantizer.status.route()).version == version
    diverged = version + 6
    bad = state["model.layers.1.mlp.down_proj.weight"].clone()
    bad[0, 0] = float("nan")
    await store.put_weights(diverged, {**state, "model.layers.1.mlp.down_proj.weight": bad})
    await quantizer.load.route(diverged)
    with pytest.raises(QuantizationError, match=r"model\.layers\.1\.mlp\.down_proj"):
        await quantizer.quantize.route(diverged, "bf16")


async def test_it_answers_while_it_works(policy):
    quantizer, _, version = policy
    await quantizer.load.route(version)
    long = random_rollouts(300, length=200)
    work = asyncio.create_task(quantizer.reference.route(version, long))
    await asyncio.sleep(0.1)
    start = time.monotonic()
    await quantizer.status.route()
    waited = time.monotonic() - start
    assert not work.done()
    assert len(await work) == 300
    assert waited < 2
