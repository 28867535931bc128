"""A generator's process dies, in every way and at awkward moments: what comes after it serves bit
for bit the committed artifact, never the checkpoint that its engine was built from."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from forge_ptq import runtime, store, store_io
from forge_ptq.artifact import ArtifactRef, QuantizedArtifact
from tests.fault.engine_actors import BreakableGenerator
from tests.integration.engine_support import (
    MIXED,
    Harness,
    artifact_of,
    changed,
    hf_state,
    tokens_of,
)
from tests.loop import make_policy

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

ENGINE = {
    "max_model_len": 128,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 32 << 20,
    "enable_prefix_caching": False,
}
ASKED = [1, 2, 3, 4, 5]
GREEDY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
WITHIN_S = 120.0


@dataclass
class World:
    """One replica of the generator as a service, and what each artifact says on a fresh engine."""

    policy: Any
    artifacts: dict[str, QuantizedArtifact]
    truth: dict[str, tuple[list[int], list[float]]]
    log_dir: Path
    refs: dict[str, ArtifactRef] = field(default_factory=dict)

    async def all(self, endpoint: str, *args: Any) -> Any:
        """The endpoint on the one replica; None where it died under the call."""
        (result,) = await asyncio.wait_for(getattr(self.policy, endpoint).fanout(*args), WITHIN_S)
        return result

    async def commit(self, name: str) -> None:
        """As a publish does: stage, move the pointer, flip."""
        await self.all("stage", self.refs[name])
        await store.set_committed(self.refs[name])
        await self.all("commit", self.refs[name].artifact_id)

    async def serves(self, name: str, admission: str = "live") -> None:
        """Greedy tokens and logprobs are those of a fresh engine that serves this artifact."""
        call = self.policy.generate.route(ASKED, sampling_params=GREEDY)
        (got,) = await asyncio.wait_for(call, WITHIN_S)
        assert got.metadata["artifact_id"] == self.refs[name].artifact_id
        assert got.metadata["arm"] == admission
        assert (got.token_ids.tolist(), got.logprobs.tolist()) == self.truth[name]

    async def pid(self) -> int:
        """Of the replica that serves."""
        (pid,) = await runtime.pids(self.policy)
        return pid

    async def kill(self) -> None:
        """SIGKILL, now."""
        os.kill(await self.pid(), signal.SIGKILL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("death")
    model = make_policy(folder / "hf")
    weights = {version: changed(hf_state(model), version) for version in (1, 2)}
    artifacts = {
        "one": artifact_of(weights[1], 1, overrides=MIXED),
        "two": artifact_of(weights[2], 2),
        "two in bf16": artifact_of(weights[2], 2, default="bf16"),
    }
    harness = Harness(model, **ENGINE)
    truth = {}
    for name, artifact in artifacts.items():
        harness.publish(artifact)
        (sample,) = harness.generate([ASKED], max_tokens=8)
        truth[name] = tokens_of([sample])[0]
    harness.thread.stop()
    assert len({str(said) for said in truth.values()}) == 3

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORGE_PTQ_LOG_DIR", str(folder))
        await runtime.init_provisioner()
        try:
            await store.initialize()
            policy = await BreakableGenerator.options(
                mesh_name="policy",
                env={"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
                unavailable_timeout_s=45.0,
            ).as_service(
                engine_args={"model": str(model), **ENGINE},
                sampling_params={"max_tokens": 4},
                admission={"mode": "load", "bf16_below": 10**6, "int8_above": 10**7},
            )
            world = World(policy, artifacts, truth, folder)
            for name, artifact in artifacts.items():
                world.refs[name] = await store.put_artifact(artifact)
            yield world
            await store.shutdown()
        finally:
            await runtime.shutdown()


async def test_a_dead_engine_is_replaced_and_no_request_fails(world: World) -> None:
    """With nothing committed the checkpoint is what serves, before and after."""
    policy = world.policy
    assert len(await policy.generate.route([1, 2])) == 1
    before = await world.pid()
    await policy.break_engine.route()
    # The requests that it dies under are served by its successor.
    calls = [asyncio.wait_for(policy.generate.route([1, 2, i]), WITHIN_S) for i in range(3)]
    for (completion,) in await asyncio.gather(*calls):
        assert len(completion.token_ids) > 0
        assert completion.generator_version == 0
        assert completion.metadata["artifact_id"] == "checkpoint"
    assert await world.pid() != before
    log = "".join(path.read_text() for path in world.log_dir.glob("policy*.log"))
    assert "the engine died, so this process ends" in log
    assert "ArithmeticError: device error" in log


async def test_crashes_in_a_walk_of_operations(world: World) -> None:
    """Kills in the middle of filling a slot, and between pointer and flip. Requests that stream in
    all along meet nothing but committed artifacts."""
    await world.commit("one")
    await world.serves("one")
    met: set[str] = set()
    over = asyncio.Event()

    async def stream() -> None:
        while not over.is_set():
            call = world.policy.generate.route([7, 8, 9], sampling_params={"max_tokens": 3})
            for completion in await asyncio.wait_for(call, WITHIN_S):
                met.add(completion.metadata["artifact_id"])

    streaming = asyncio.create_task(stream())
    try:
        await world.all("slow_filling", 0.2)
        staging = asyncio.create_task(world.all("stage", world.refs["two"]))
        async with asyncio.timeout(60):
            while not (await world.all("describe"))["staging"]:
                assert not staging.done()
        await world.kill()
        await asyncio.gather(staging, return_exceptions=True)
        await world.serves("one")
        with pytest.raises(Exception, match="cannot roll back"):
            await world.all("rollback")  # a new process holds nothing to go back to
        with pytest.raises(Exception, match="cannot commit"):
            await world.all("commit", world.refs["two"].artifact_id)

        await world.commit("two")  # a refusal, a rollback and a companion on the way
        await world.serves("two")
        await store.set_committed(world.refs["one"])
        await world.all("rollback", world.refs["one"].artifact_id)
        await world.serves("one")
        assert await world.all("discard") is True
        await world.commit("two")
        await world.all("accompany", world.refs["two in bf16"])
        await world.serves("two in bf16", "companion")
        await world.all("discard")
        await world.serves("two")

        await world.all("stage", world.refs["one"])
        await store.set_committed(world.refs["one"])
        await world.kill()  # between the two halves of a commit
        await world.serves("one")
    finally:
        over.set()
        await asyncio.wait_for(streaming, WITHIN_S)
    assert met == {ref.artifact_id for ref in world.refs.values()}


async def test_who_strayed_conforms(world: World) -> None:
    """By a flip where a slot holds it, else from the store; also if it is damaged in the slot."""
    await world.commit("one")
    assert (await world.all("conform"))["loaded"] is False
    await store.set_committed(world.refs["two"])  # behind its back
    assert (await world.all("conform"))["loaded"] is True
    await world.serves("two")
    await store.set_committed(world.refs["one"])
    await world.all("stage", world.refs["one"])
    assert (await world.all("conform"))["loaded"] is False
    await world.serves("one")
    assert await world.all("damage_live") == "model.layers.1.mlp.up_proj"
    with pytest.raises(AssertionError):
        await world.serves("one")
    assert (await world.all("conform"))["loaded"] is True
    await world.serves("one")


async def test_a_committed_artifact_that_is_damaged_stops_the_service_not_silently(
    world: World,
) -> None:
    """One flipped byte in the store. A replica that must conform ends, and its successor does not
    come up: requests fail, and say why, until something sound is committed."""
    await world.commit("two")
    bad = await store.put_artifact(artifact_of(changed(hf_state(world.log_dir / "hf"), 3), 3))
    (key,) = [k for k in await store_io.keys(f"ptq_artifact.{bad.artifact_id}") if "chunk" in k]
    chunk = await store_io.get(key)
    chunk[100] ^= 1
    await store_io.put(key, chunk)
    before = await world.pid()
    await store.set_committed(bad)
    assert await world.all("conform") is None, "its process ends instead of serving version 2 on"
    said = ""
    limits = world.policy.service.cfg
    patience, limits.unavailable_timeout_s = limits.unavailable_timeout_s, 3.0
    async with asyncio.timeout(WITHIN_S):
        while "cannot be served" not in said:
            with pytest.raises(runtime.ServiceUnavailable) as caught:
                await world.policy.generate.route(ASKED, sampling_params=GREEDY)
            said = str(caught.value)
    limits.unavailable_timeout_s = patience
    assert f"the committed artifact {bad.artifact_id} (version 3) cannot be served" in said
    assert "sha256" in said
    await store.set_committed(world.refs["one"])
    await world.serves("one")
    assert await world.pid() != before
    await store.drop_artifact(bad)
