"""Quantizer: the actor that turns pushed bf16 weights into artifacts.

    quantizer = await Quantizer.options(...).as_service(model_path=..., plan={...})
    await quantizer.load.route(version)                  # W_v from the store
    await quantizer.calibrate.route(version, rollouts)   # only if the plan has static layers
    ref = await quantizer.quantize.route(version)        # artifact in the store
    hidden = await quantizer.reference.route(version, rollouts)

Every endpoint may be called again with the same arguments, also after a respawn, when the copy of
the policy and the calibration are gone: ``status`` says what is there. Calls are carried out one
at a time, in order, and all tensor work runs in a worker thread, so ``status`` always answers.
(The endpoints are concurrent because Monarch handles no other message while a plain one runs.)

The worker's threads: environment variable OMP_NUM_THREADS, else all cores that this process may
use but one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from forge_ptq import store
from forge_ptq.artifact import ArtifactRef, QuantizedArtifact
from forge_ptq.numerics.plan import QuantPlan
from forge_ptq.runtime import ForgeActor, concurrent_endpoint, endpoint
from forge_ptq.services.policy_copy import PolicyCopy, Sequence_, build_model

T = TypeVar("T")


@dataclass(frozen=True)
class QuantizerStatus:
    """What a Quantizer holds right now."""

    version: int | None
    """Policy version loaded."""
    needs_calibration: bool
    """The plan has static layers and this process has no ranges for them."""
    layers: dict[str, str]
    """The plan, resolved: HF module name -> scheme."""


def worker_threads() -> int:
    """Threads for tensor work, see the module's docstring."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    return max(1, len(os.sched_getaffinity(0)) - 1)


class Quantizer(ForgeActor):
    """Holds a full-precision copy of the policy and quantizes it.

    Args: model_path, a HF checkpoint directory (only its config is read); plan,
    {"default": scheme, "overrides": {glob: scheme}}; dtype of the copy and so of the reference
    (see ``build_model``).
    """

    def __init__(
        self, model_path: str, plan: Mapping[str, Any] | None = None, dtype: str = "auto"
    ) -> None:
        super().__init__()
        self.model_path = model_path
        self.dtype = dtype
        self.plan = QuantPlan.from_config(**(plan or {"default": "int8_dynamic"}))
        self.ranges: dict[str, float] = {}
        self._policy: PolicyCopy | None = None
        self._turn = asyncio.Lock()
        self._worker = ThreadPoolExecutor(
            1, "quantizer", initializer=torch.set_num_threads, initargs=(worker_threads(),)
        )

    @endpoint
    async def setup(self) -> None:
        """Build the module tree; raises for a checkpoint or a plan that does not work."""

        def build() -> PolicyCopy:
            return PolicyCopy(build_model(self.model_path, self.dtype), self.plan)

        self._policy = await self._run(build)

    @concurrent_endpoint
    async def status(self) -> QuantizerStatus:
        """Version, calibration and plan; answers while other endpoints work."""
        policy = self._ready()
        return QuantizerStatus(policy.version, self._needs_calibration(), dict(policy.layers))

    @concurrent_endpoint
    async def load(self, version: int) -> QuantizerStatus:
        """Pull a policy version from the store; does nothing if it is loaded.

        Raises StoreError if the version is not complete, ValueError naming a tensor that is
        missing, unknown or of another shape.
        """
        policy = self._ready()
        async with self._turn:
            if policy.version != version:
                weights = await store.get_weights(version)
                await self._run(lambda: policy.load(version, weights))
        return QuantizerStatus(version, self._needs_calibration(), dict(policy.layers))

    @concurrent_endpoint
    async def reference(self, version: int, sequences: Sequence[Sequence_]) -> list[torch.Tensor]:
        """Final-normed hidden states [R, H] of the loaded version, one tensor a sequence.

        R = len(token_ids) - response_start; row i is from position response_start + i - 1.
        """
        async with self._turn:
            policy = self._loaded(version)
            return await self._run(lambda: policy.reference(sequences))

    @concurrent_endpoint
    async def calibrate(self, version: int, sequences: Sequence[Sequence_]) -> dict[str, float]:
        """Measure max|x| of every static layer's input over whole sequences; replaces the ranges.

        Returns {layer: absmax}, which later ``quantize`` calls use until the next calibration.
        """
        if not sequences:
            raise ValueError("calibrate: no sequences")
        async with self._turn:
            policy = self._loaded(version)
            self.ranges = await self._run(lambda: policy.absmax(sequences))
            return dict(self.ranges)

    @concurrent_endpoint
    async def quantize(
        self, version: int, scheme_override: str | None = None, fault: str | None = None
    ) -> ArtifactRef:
        """Quantize the loaded version and store the artifact; a fresh artifact_id every time.

        scheme_override: one scheme for every layer instead of the plan ("bf16": fall back).
        fault: "corrupt_scales" makes a wrong artifact with right hashes, for demonstrations.
        Raises QuantizationError naming the layer for weights that are not finite.
        """
        if fault not in (None, "corrupt_scales"):
            raise ValueError(f"fault: expected corrupt_scales or None, got {fault!r}")
        async with self._turn:
            policy = self._loaded(version)
            layers = policy.layers
            if scheme_override is not None:
                layers = self.plan.override_all(scheme_override).resolve(policy.linears)
            if "int8_static" in layers.values() and not self.ranges:
                raise ValueError("the plan has int8_static layers: calibrate before quantize")

            def build() -> QuantizedArtifact:
                tensors, used, notes = policy.quantize(
                    layers, self.ranges, corrupt=fault is not None
                )
                return QuantizedArtifact.build(
                    policy_version=version,
                    model=policy.architecture,
                    layers=used,
                    tensors=tensors,
                    notes=notes,
                )

            return await store.put_artifact(await self._run(build))

    def _ready(self) -> PolicyCopy:
        if self._policy is None:
            raise RuntimeError("the Quantizer is not set up yet")
        return self._policy

    def _loaded(self, version: int) -> PolicyCopy:
        policy = self._ready()
        if policy.version != version:
            raise ValueError(f"version {version} is not loaded (loaded: {policy.version})")
        return policy

    def _needs_calibration(self) -> bool:
        return "int8_static" in self._ready().layers.values() and not self.ranges

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)
