"""Doubles of a generator service and of a fleet of quantizers, whose failures are set by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from forge_ptq import store
from forge_ptq.artifact import ArtifactRef, QuantizedArtifact
from forge_ptq.engine.types import CommitReport, ProbeScore
from forge_ptq.numerics.calibration import Calibration
from forge_ptq.numerics.drift import Drift
from forge_ptq.numerics.schemes import get_scheme
from forge_ptq.services.ladder import BETTER, Move, overlaid

ENDPOINTS = (
    "stage", "describe", "probe", "commit", "discard", "accompany", "conform", "damage_live",
)  # fmt: skip


@dataclass
class Replica:
    """One generator: two slots and a list of endpoints that fail, hang or die, by call count."""

    live: str | None = None
    idle: str | None = None
    layers: dict[str, str] = field(default_factory=dict)
    faults: dict[str, Any] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    kl: float | Callable[[dict[str, str]], float] = 0.01
    """KL per token of a staged artifact with a quantized layer, or what makes it of its schemes."""
    live_layers: dict[str, str] = field(default_factory=dict)
    companion: str | None = None
    damaged: list[str | None] = field(default_factory=list)
    away: bool = False
    """It is being respawned: nobody asks it."""

    async def call(self, name: str, *args: Any) -> Any:
        self.calls.append(name)
        fault = self.faults.get(name)
        if callable(fault):
            fault = fault()
        if fault == "hang":
            await asyncio.sleep(60)
        if isinstance(fault, Exception) and name == "conform":
            fault = "die"  # the engine ends its process
        if fault == "die":  # comes back serving what the store's pointer names
            committed = await store.get_committed()
            self.live, self.idle = (committed.artifact_id if committed else None), None
            return None
        if fault == "die early":  # it had read the pointer before that moved
            self.idle = None
            return None
        if isinstance(fault, Exception):
            raise fault
        return await getattr(self, name)(*args)

    async def stage(self, ref: ArtifactRef) -> Any:
        artifact = await store.get_artifact(ref)
        self.idle, self.layers = ref.artifact_id, dict(artifact.manifest.layers)
        self.companion = None
        return SimpleNamespace(bytes=1)

    async def describe(self) -> dict[str, Any]:
        slots = [
            {"artifact_id": self.live, "state": "ready", "layers": {}},
            {"artifact_id": self.idle, "state": "ready", "layers": self.layers},
        ]
        return {"live": 0, "staging": False, "slots": slots}

    async def probe(self, sequences: list[Any]) -> list[ProbeScore]:
        scores = []
        for sequence in sequences:
            count = len(sequence.token_ids) - sequence.response_start
            assert sequence.reference_hidden.shape[0] == count
            kl = self.kl(self.layers) if callable(self.kl) else self.kl
            kl = 0.001 if set(self.layers.values()) == {"bf16"} else kl
            scores.append(
                ProbeScore(torch.zeros(count), torch.zeros(count), torch.full((count,), kl))
            )
        return scores

    async def commit(self, artifact_id: str) -> CommitReport:
        if self.idle != artifact_id:
            raise RuntimeError(f"cannot commit {artifact_id}: the idle slot holds {self.idle}")
        self._flip()
        return CommitReport(artifact_id, 0, 0, 1e-6, 0.02, 0.01, 0)

    def _flip(self) -> None:
        self.live, self.idle = self.idle, self.live
        self.live_layers, self.layers = self.layers, self.live_layers
        self.companion = None

    async def discard(self) -> bool:
        self.idle = self.companion = None
        return True

    async def accompany(self, ref: ArtifactRef) -> Any:
        report = await self.stage(ref)
        self.companion, self.idle = ref.artifact_id, None
        return report

    async def conform(self, deadline_s: float | None = None) -> dict[str, Any]:
        """As the engine does it: flip back if a slot holds what is committed, else load it."""
        ref = await store.get_committed()
        assert ref is not None
        loaded = False
        if self.live != ref.artifact_id:
            if self.idle != ref.artifact_id:
                await self.stage(ref)
                loaded = True
            self._flip()
        return {"artifact_id": self.live, "loaded": loaded, "seconds": 0.0}

    async def damage_live(self) -> None:
        self.damaged.append(self.live)


class MemoryStore:
    """The store's calls over dictionaries, for interleavings that need no processes."""

    def __init__(self) -> None:
        self.artifacts: dict[str, QuantizedArtifact] = {}
        self.weights: dict[int, Any] = {}
        self.committed: ArtifactRef | None = None
        self.failing: set[str] = set()

    def install(self, patch: Any) -> None:
        """Put in place of forge_ptq.store's functions."""
        for name in dir(self):
            if hasattr(store, name) and not name.startswith("_"):
                patch.setattr(store, name, self._call(name))

    def _call(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            await asyncio.sleep(0)
            if name in self.failing:
                raise store.StoreError(f"{name}: no answer from the store")
            return getattr(self, name)(*args)

        return call

    def put_artifact(self, artifact: QuantizedArtifact) -> ArtifactRef:
        self.artifacts[artifact.manifest.artifact_id] = artifact
        return artifact.manifest.ref

    def get_artifact(self, ref: ArtifactRef) -> QuantizedArtifact:
        if ref.artifact_id not in self.artifacts:
            raise store.StoreError(f"get {ref.artifact_id}: no such artifact")
        return self.artifacts[ref.artifact_id]

    def get_manifest(self, ref: ArtifactRef) -> Any:
        return self.get_artifact(ref).manifest

    def artifact_ids(self) -> list[str]:
        return sorted(self.artifacts)

    def drop_artifact(self, artifact: ArtifactRef | str) -> int:
        key = artifact if isinstance(artifact, str) else artifact.artifact_id
        return int(self.artifacts.pop(key, None) is not None)

    def get_committed(self) -> ArtifactRef | None:
        return self.committed

    def set_committed(self, ref: ArtifactRef | None) -> None:
        self.committed = ref

    def put_weights(self, version: int, state: Any) -> None:
        self.weights[version] = state

    def weight_versions(self) -> list[int]:
        return sorted(self.weights)

    def drop_weights(self, version: int) -> int:
        return int(self.weights.pop(version, None) is not None)


class Generators:
    """The service double: route to the first replica, fan out to all."""

    def __init__(self, count: int = 1) -> None:
        self.replicas = [Replica() for _ in range(count)]
        for name in ENDPOINTS:
            setattr(self, name, self._endpoint(name))

    def _endpoint(self, name: str) -> Any:
        async def route(*args: Any) -> Any:
            return await self.replicas[0].call(name, *args)

        async def fanout(*args: Any) -> list[Any]:
            results = await asyncio.gather(
                *(replica.call(name, *args) for replica in self.replicas if not replica.away),
                return_exceptions=True,
            )
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            return results

        return SimpleNamespace(route=route, fanout=fanout)

    @property
    def live(self) -> list[str | None]:
        return [replica.live for replica in self.replicas]


class FakeFleet:
    """The fleet's double: small artifacts of whatever schemes are asked for. The ranking moves the
    layers in order, all static ones before the dynamic ones."""

    def __init__(self, scheme: str = "int8_dynamic", layers: Sequence[str] = ("a",)) -> None:
        self.scheme = scheme
        self.layers = tuple(layers)
        self.last_flips: float | None = None
        self.log: list[Any] = []
        self.faults: dict[str, Any] = {}
        self.calibration: Calibration | None = None
        self.last_drift: dict[str, Drift] = {}
        self.drift = Drift(0.0, 0.01, 1.0)
        for name in ("calibrate", "quantize", "rank", "reference"):
            setattr(self, name, self._call(name))

    def _call(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            self.log.append((name, args))
            if name in self.faults:
                if self.faults[name] == "hang":
                    await asyncio.sleep(60)
                raise self.faults[name]
            return await getattr(self, f"_{name}")(*args)

        return call

    async def close(self) -> None:
        """Nothing runs in the background here."""

    def count(self, name: str) -> int:
        return sum(entry[0] == name for entry in self.log)

    async def _calibrate(self, version: int, rollouts: list[Any], plan: list[Any]) -> Calibration:
        before = self.calibration.round if self.calibration else 0
        self.calibration = Calibration(
            before + 1, version, dict.fromkeys(self.layers, self.scheme),
            dict.fromkeys(self.layers, 1.0), tokens=len(rollouts),
            contributors=("host:1", "host:2"), dropped=("host:3: NaN",),
        )  # fmt: skip
        return self.calibration

    async def _quantize(
        self,
        version: int,
        scheme: str | None = None,
        fault: str | None = None,
        overlay: Mapping[str, str] | None = None,
    ) -> ArtifactRef:
        asked = dict.fromkeys(self.layers, scheme or self.scheme)
        used = overlaid(asked, overlay or {}) if scheme is None else asked
        tensors: dict[str, torch.Tensor] = {}
        for name, kind in used.items():
            parts = get_scheme(kind).quantize(torch.randn(4, 4), absmax=1.0)
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        artifact = QuantizedArtifact.build(
            policy_version=version, model="toy", layers=used, asked=asked, tensors=tensors
        )
        return await store.put_artifact(artifact)

    async def _rank(self, version: int, overlay: Mapping[str, str]) -> tuple[Move, ...]:
        now = overlaid(dict.fromkeys(self.layers, self.scheme), overlay)
        order = list(BETTER)
        return tuple(
            Move((name,), now[name], order[BETTER[now[name]] + 1], 1 / len(self.layers))
            for name in sorted(self.layers, key=lambda name: BETTER[now[name]])
            if now[name] != "bf16"
        )

    async def _reference(self, version: int, rollouts: list[Any]) -> list[torch.Tensor]:
        self.last_drift = {"a": self.drift} if self.calibration else {}
        return [torch.zeros(len(r.token_ids) - r.response_start, 4) for r in rollouts]


def episodes(groups: int) -> list[Any]:
    return [
        SimpleNamespace(
            completion=SimpleNamespace(
                prompt_ids=[group, 2], token_ids=[3, 4, 5], generator_version=0
            ),
            reward=1.0,
            policy_version=0,
        )
        for group in range(groups)
    ]
