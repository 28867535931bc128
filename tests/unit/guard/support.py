"""What the guard's interleavings share: a publisher over doubles, and evidence made by hand."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from forge_ptq import store
from forge_ptq.config import PlanConfig, PTQConfig
from forge_ptq.mismatch import SequenceMismatch
from forge_ptq.services.ptq import PTQ
from tests.integration.publish_doubles import FakeFleet, Generators, episodes

LAYERS = ("l0.down_proj", "l1.down_proj", "l0.o_proj", "l1.o_proj")
LADDER = PTQConfig().guard.on_reject


async def launch(
    generators: Generators,
    fleet: FakeFleet,
    offered: int = 60,
    inject: Any = (),
    state: Any = None,
    **settings: Any,
) -> PTQ:
    cfg = PTQConfig()
    cfg.probe.min_sequences, cfg.probe.sequences, cfg.probe.max_sequences = 4, 8, 8
    cfg.plan = PlanConfig(default=fleet.scheme)  # type: ignore[arg-type]
    cfg.smoothing.enabled, cfg.calibration.rollouts = False, 8
    cfg.guard.demote_share, cfg.guard.recover_after = 0.25, 3
    cfg.guard.probation.episodes, cfg.guard.probation.patience = 4, 1
    for key, value in settings.items():
        block: Any = cfg
        *path, name = key.split("__")
        for part in path:
            block = getattr(block, part)
        setattr(block, name, value)
    ptq = await PTQ.attach(cfg, generators, fleet, inject, state)
    await ptq.offer(episodes(offered))
    return ptq


def bad_below(count: int) -> Any:
    """KL of an artifact: fine once this many layers are in bf16 or dynamic."""

    def kl(layers: dict[str, str]) -> float:
        return 0.01 if sum(s != "int8_static" for s in layers.values()) >= count else 0.2

    return kl


def records(ref_or_id: Any, k3: float = 0.01, count: int = 4, **changes: Any) -> list[Any]:
    artifact_id = getattr(ref_or_id, "artifact_id", ref_or_id)
    fields: dict[str, Any] = {
        "artifact_id": artifact_id, "scheme": "int8_static", "policy_version": 1, "age": 1,
        "tokens": 10, "k1_sum": 0.0, "k3_sum": 10 * k3, "ratio_sum": 10.0, "ratio_sq_sum": 11.0,
        "max_abs_gap": 0.1, "reward": 0.0, "group": "g",
    }  # fmt: skip
    return [SequenceMismatch(**(fields | changes))] * count


def path(transitions: Any) -> list[str]:
    return [t.to for t in transitions]


def overlays(fleet: FakeFleet) -> list[dict[str, str]]:
    return [dict(args[3]) for name, args in fleet.log if name == "quantize" and len(args) > 3]


async def agree(generators: Generators, ptq: PTQ) -> None:
    """Pointer, replicas and publisher name the same artifact, and it is in the store."""
    committed = await store.get_committed()
    assert committed is not None
    assert generators.live == [committed.artifact_id] * len(generators.replicas)
    assert ptq.serving.current is not None
    assert ptq.serving.current.ref == committed
    await store.get_manifest(committed)


def held_up(replica: Any, name: str) -> tuple[asyncio.Event, asyncio.Event]:
    """An endpoint that says when it was called, and waits for the second event."""
    there, go, real = asyncio.Event(), asyncio.Event(), getattr(replica, name)

    async def waiting(*args: Any) -> Any:
        there.set()
        await go.wait()
        return await real(*args)

    setattr(replica, name, waiting)
    return there, go


async def held(ptq: PTQ, replica: Any, name: str, version: int) -> tuple[Any, asyncio.Event]:
    """A publish that has come to an endpoint and waits there."""
    there, go = held_up(replica, name)
    task = asyncio.create_task(ptq.publish(version))
    await asyncio.wait_for(there.wait(), 10)
    return task, go


def arm(
    ptq: PTQ, which: str, reward: float | None, prompt: int, drawn: bool = True, **metadata: Any
) -> Any:
    """An episode of what serves now."""
    ref = ptq.serving.current.ref if which == "live" else ptq.serving.companion  # type: ignore[union-attr]
    assert ref is not None
    return SimpleNamespace(
        completion=SimpleNamespace(
            prompt_ids=[prompt, 2], token_ids=[3], generator_version=0,
            metadata={"arm": which, "artifact_id": ref.artifact_id, "drawn": drawn} | metadata,
        ),
        reward=reward, policy_version=0,
    )  # fmt: skip
