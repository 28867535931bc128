"""Real processes killed and stopped in every phase of a publish.

After each fault one thing must hold: every generator serves the committed artifact, bit for bit
what the store holds of it, and the next publish succeeds. The cells go on from each other.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch

from forge_ptq import runtime, store, store_io
from forge_ptq.artifact import QuantizedArtifact
from forge_ptq.services import candidate
from forge_ptq.services.candidate import Candidate
from forge_ptq.services.replicas import live_artifact
from tests.fault.matrix import UPDATING, record
from tests.integration.publish_loop import Loop, running_loop
from tests.integration.runtime_support import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300), pytest.mark.slow]

SERVES, KEPT, EITHER = "serves", "kept", "serves or kept"
OUTCOMES = {"accepted": SERVES, "demoted": SERVES, "fell_back": "bf16", "kept": KEPT}


class World(Loop):
    """The loop, versions that count up, and the invariant."""

    versions = itertools.count(1)
    _known: dict[str, Any]
    """Artifact id -> what it answers."""

    async def publish(self) -> Any:
        """The next version, pushed and offered."""
        version = next(self.versions)
        await self.push(version)
        return await self.ptq.publish(version)

    async def invariant(self) -> None:
        """What serves is the committed artifact, and answers as the one in the store does."""
        ref = await store.get_committed()
        assert ref is not None
        await store.get_artifact(ref)  # which verifies its hashes
        answers = await self.greedy()
        assert {answer[2:] for answer in answers} == {(ref.policy_version, ref.artifact_id)}
        assert answers == self._known.setdefault(ref.artifact_id, answers)
        for description in await self.policy.describe.fanout():
            assert live_artifact(description) == ref.artifact_id
        assert self.ptq.served_version == ref.policy_version
        await self.policy.stage.fanout(ref)
        await self.policy.commit.fanout(ref.artifact_id)
        assert await self.greedy() == answers

    async def cell(self, phase: str, fault: str, expected: str) -> None:
        """A publish with a fault on its way has ended: all is well again, and it was as expected.
        Where a moment decides what came of it, that is EITHER."""
        await self.invariant()
        good = await self.publish()
        assert good.outcome == "accepted", good.reason
        await self.invariant()
        struck = self.ptq.verdicts[-2]
        allowed = (SERVES, KEPT) if expected == EITHER else (expected,)
        assert OUTCOMES[struck.outcome] in allowed, struck.reason
        record(phase, fault, expected, __file__)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory):
    async with running_loop(tmp_path_factory.mktemp("policy")) as loop:
        made = World(loop.path, loop.policy, loop.quantizer, loop.ptq, loop.store_pid)
        made._known = {}
        await made.offer(groups=24, seed=0)
        cfg = made.ptq.cfg
        cfg.sampler.max_age = made.ptq.sampler.max_age = 1000
        cfg.calibrate_every = 1000
        first = await made.publish()
        assert first.outcome == "accepted", first.reason
        await made.invariant()
        yield made


def at(monkeypatch: pytest.MonkeyPatch, phase: str, strike: Callable[[], None]) -> None:
    """Strike once, when the next publish gets to `phase`."""
    pending = [strike]

    def once() -> None:
        if pending:
            pending.pop()()

    if phase == "flip":
        real = store.set_committed

        async def then_strike(ref: Any) -> None:
            await real(ref)
            once()

        monkeypatch.setattr(store, "set_committed", then_strike)
        return

    def entering(self: Candidate, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "phase" and value == phase:
            once()

    monkeypatch.setattr(Candidate, "__setattr__", entering, raising=False)


async def pid_of(handle: Any) -> int:
    """First process behind a handle, once it has one that lives."""

    async def alive() -> bool:
        pids = await runtime.pids(handle)
        return bool(pids) and psutil.pid_exists(pids[0])

    await eventually(alive, 60)
    return (await runtime.pids(handle))[0]


async def healthy(handle: Any, count: int) -> None:
    """Returns once a service has that many replicas."""

    async def enough() -> bool:
        summary = await handle.get_metrics_summary()
        return int(summary["service"]["healthy_replicas"]) >= count

    await eventually(enough, 120)


async def strike_and_publish(
    world: World, monkeypatch: pytest.MonkeyPatch, phase: str, handle: Any, number: int
) -> Any:
    """Send a signal to the first process behind handle when the next publish is in `phase`."""
    pid = await pid_of(handle)
    if phase == "calibrate":
        world.ptq.cfg.calibrate_every = 1
    if phase == "push":
        os.kill(pid, number)
    elif phase != "served":
        at(monkeypatch, phase, lambda: os.kill(pid, number))
    verdict = await world.publish()
    monkeypatch.undo()
    world.ptq.cfg.calibrate_every = 1000
    if phase == "served":
        os.kill(pid, number)
    return verdict


GENERATOR = {
    "push": SERVES, "calibrate": SERVES, "quantize": SERVES, "stage": EITHER, "probe": KEPT,
    "commit": SERVES, "flip": SERVES, "served": SERVES,
}  # fmt: skip
"""Killed before it stages, it is back in time, if its death is noticed before the call; one that
comes back has no candidate to probe; once that is judged, whoever comes back reads the pointer."""

OFTEN = {"generator": ("stage", "probe", "flip"), "quantizer": ("calibrate", "quantize", "probe")}
"""Where they die in every test run: a generator takes 12 s to come back, and a quantizer has
nothing to do in the other phases. Where the matrix is written anew they die in all of them."""
CELLS = [
    (phase, victim)
    for phase in GENERATOR
    # A quantizer comes back while the next cell waits for its generator.
    for victim in ("quantizer", "generator")
    if UPDATING or phase in OFTEN[victim]
]


@pytest.mark.parametrize(("phase", "victim"), CELLS)
async def test_killed(world, monkeypatch, phase, victim):
    if victim == "generator":
        await strike_and_publish(world, monkeypatch, phase, world.policy, signal.SIGKILL)
        await world.cell(phase, "generator killed", GENERATOR[phase])
    else:
        await healthy(world.quantizer, 2)
        await strike_and_publish(world, monkeypatch, phase, world.quantizer, signal.SIGKILL)
        await world.cell(phase, "quantizer killed", SERVES)


async def test_merger_killed(world, monkeypatch):
    handle = world.ptq.fleet.merger
    await strike_and_publish(world, monkeypatch, "calibrate", handle, signal.SIGKILL)
    await world.cell("calibrate", "merger killed", SERVES)


@pytest.mark.parametrize("phase", ["quantize", "probe"])
async def test_coordinator_killed(world, monkeypatch, phase):
    handle = world.ptq.fleet.crew.coordinator
    await strike_and_publish(world, monkeypatch, phase, handle, signal.SIGKILL)
    await world.cell(phase, "coordinator killed", SERVES)


async def test_generator_stopped(world, monkeypatch):
    """It hangs in the probe and goes on later, when the publish is over."""
    pid, limits = await pid_of(world.policy), world.ptq.cfg.deadlines
    monkeypatch.setattr(limits, "probe_s", 1.5)
    monkeypatch.setattr(limits, "commit_s", 1.5)
    monkeypatch.setattr(candidate, "GRACE_S", 0.5)
    with pytest.MonkeyPatch.context() as patch:
        at(patch, "probe", lambda: os.kill(pid, signal.SIGSTOP))
        verdict = await world.publish()
    os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    assert verdict.outcome == "kept"
    assert "within 1.5 s" in verdict.reason
    await world.cell("probe", "generator stopped", KEPT)


def scaled(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    """Puts a value among the weight scales of one layer."""

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if name.endswith(".weight_scale"))
        tensors[name] = tensors[name].clone()
        tensors[name][-1] = value

    return damage


def missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def extra(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.mlp.bias"] = torch.ones(3, dtype=torch.bfloat16)


def shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1].clone()


def dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()


def another_model(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        tensors[name.replace("model.layers.1.", "model.layers.7.")] = tensors.pop(name)


@pytest.mark.parametrize(
    "damage",
    [missing, extra, shape, dtype, another_model, *map(scaled, (0.0, -0.01, math.inf, math.nan))],
    ids=["missing", "extra", "shape", "dtype", "model", "zero", "negative", "inf", "nan"],
)
async def test_malformed_artifact_though_its_hashes_are_right(world, monkeypatch, damage):
    real = world.ptq.fleet.quantize

    async def malformed(*args: Any, **kwargs: Any) -> Any:
        artifact = await store.get_artifact(await real(*args, **kwargs))
        tensors = dict(artifact.tensors)
        damage(tensors)
        layers = {
            name: scheme
            for name, scheme in artifact.manifest.layers.items()
            if f"{name}.weight" in tensors
        }
        made = QuantizedArtifact.build(
            policy_version=artifact.manifest.policy_version,
            model=artifact.manifest.model,
            layers=layers,
            tensors=tensors,
        )
        return await store.put_artifact(made)

    monkeypatch.setattr(world.ptq.fleet, "quantize", malformed)
    verdict = await world.publish()
    monkeypatch.undo()
    assert verdict.outcome == "kept"
    assert not verdict.refused
    assert verdict.reason.startswith("stage failed: "), verdict.reason
    await world.invariant()
    record("stage", "artifact malformed", KEPT, __file__)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "gone"])
async def test_artifact_altered_in_the_store(world, monkeypatch, damage):
    """After it was made and before any generator has it."""
    real = store.get_manifest

    async def altered(ref: Any) -> Any:
        monkeypatch.undo()
        manifest = await real(ref)
        key = next(
            k for k in await store_io.keys(f"ptq_artifact.{ref.artifact_id}") if "chunk" in k
        )
        chunk = (await store_io.get(key)).clone()
        await store_io.purge([key])
        if damage == "flipped":
            chunk[len(chunk) // 2] ^= 1
        if damage != "gone":
            await store_io.put(key, chunk[: -7 if damage == "truncated" else None].clone())
        return manifest

    monkeypatch.setattr(store, "get_manifest", altered)
    verdict = await world.publish()
    assert verdict.outcome == "kept"
    assert verdict.reason.startswith("stage failed: "), verdict.reason
    await world.cell("stage", "artifact altered in the store", KEPT)


async def test_store_killed(world, monkeypatch):
    """The last one: nothing can be published any more, and what serves serves on."""
    answers = await world.greedy()
    at(monkeypatch, "stage", lambda: os.kill(world.store_pid, signal.SIGKILL))
    verdict = await asyncio.wait_for(world.publish(), 120)
    monkeypatch.undo()
    assert verdict.outcome == "kept"
    assert verdict.reason.startswith("stage failed: "), verdict.reason
    assert "ptq_artifact" in verdict.reason, verdict.reason
    assert await world.greedy() == answers
    record("stage", "store killed", KEPT, __file__)
