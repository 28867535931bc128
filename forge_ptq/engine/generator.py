"""QuantizedGenerator: a drop-in for Forge's Generator that serves two weight slots.

    policy = await QuantizedGenerator.options(...).as_service(engine_args={...},
                                                              sampling_params={...})
    completions = await policy.generate.route(prompt)        # n of them, each of one version

with PTQ services (they quantize; this actor stages, is probed, and flips):

    await policy.stage.fanout(ref)              # idle slot, while the live one serves
    scores = await policy.probe.route(sequences)
    await policy.commit.fanout(ref.artifact_id) # or discard; later rollback
    await policy.accompany.fanout(bf16_ref)     # the same version in bf16 beside it (A/B, by load)
    await policy.conform.fanout()               # whoever strayed serves the committed one again

alone:

    await policy.update_weights.fanout(version) # pulls bf16, quantizes by its plan, stages, commits

The engine lives in this actor's process on one thread; endpoints only hand work to it and wait.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from forge_ptq.engine.admission import Admission
from forge_ptq.engine.calls import EngineCalls
from forge_ptq.engine.committed import serve_committed
from forge_ptq.engine.leaving import die, leave, until_gone
from forge_ptq.engine.requests import completion, sampling_params, token_ids
from forge_ptq.engine.types import (
    CommitReport,
    EngineDeadError,
    ProbeScore,
    ProbeSequence,
    StageReport,
)
from forge_ptq.runtime import (
    Completion,
    ForgeActor,
    Reduce,
    RequestTimeout,
    concurrent_endpoint,
    endpoint,
    record_metric,
)

if TYPE_CHECKING:
    from forge_ptq.artifact import ArtifactRef
    from forge_ptq.engine.core import SlotEngine
    from forge_ptq.engine.thread import EngineThread

log = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0


class QuantizedGenerator(EngineCalls, ForgeActor):
    """See the module.

    Args:
        engine_args: vLLM's EngineArgs by name. ``model`` is a local HF checkpoint in bf16, served
            from slot 0 as version 0 until something else is committed.
        sampling_params: defaults of ``generate``, vLLM's SamplingParams by name.
        request_timeout_s: a generate call older than this is aborted, RequestTimeout. It counts
            from the call, also for sequences that were started again on the live slot.
        drain_deadline_s: how long ``stage`` waits for the idle slot's last sequences before it
            restarts them on the live slot.
        plan: {"default": scheme, "overrides": {pattern: scheme}} of ``update_weights``.
        idle_lane_tokens: most prompt tokens of a probe step while live sequences wait; None: 64 on
            CPU, 1024 on CUDA.
        admission: which prompts go to a companion, once ``accompany`` has made one: {"mode": "off"}
            (the default), {"mode": "ab", "fraction"} or {"mode": "load", "bf16_below",
            "int8_above"}; see admission.py.
        prefetch_weights_to_shm, n_fetcher_procs: accepted as torchforge's generator accepts them;
            weights are fetched in this process, in the background.
    """

    def __init__(
        self,
        engine_args: Mapping[str, Any] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        request_timeout_s: float = 600.0,
        drain_deadline_s: float = 60.0,
        prefetch_weights_to_shm: bool = True,
        n_fetcher_procs: int = 8,
        plan: Mapping[str, Any] | None = None,
        idle_lane_tokens: int | None = None,
        admission: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine_args = dict(engine_args or {})
        self._sampling_params = dict(sampling_params or {})
        self._request_timeout_s = request_timeout_s
        self._drain_deadline_s = drain_deadline_s
        self._plan = dict(plan or {})
        self._idle_lane_tokens = idle_lane_tokens
        self._admission = Admission.from_config(admission)
        self._thread: EngineThread
        self._core: SlotEngine
        self._tokenizer: Any = None
        self._slot_jobs: set[Future[Any]] = set()
        self._stored: ArtifactRef | None = None
        self._discards = 0
        self._update_lock = asyncio.Lock()
        self._conformed = asyncio.Event()
        self._conformed.set()

    @endpoint
    async def setup(self) -> None:
        """Build the engine; serve what the store says is committed, the checkpoint if nothing is.

        CommittedArtifactError if that cannot be: then no request is taken (committed.py).
        """
        from forge_ptq.engine.build import build_engine, set_environment

        set_environment()
        from forge_ptq.engine.core import SlotEngine
        from forge_ptq.engine.thread import EngineThread

        def build() -> SlotEngine:
            return SlotEngine(
                build_engine(self._engine_args),
                idle_lane_tokens=self._idle_lane_tokens,
                admission=self._admission,
            )

        self._thread = EngineThread(build, on_death=die)
        core = await asyncio.to_thread(self._thread.start, START_TIMEOUT_S)
        assert isinstance(core, SlotEngine)
        self._core = core
        atexit.register(leave)
        self._tokenizer = core.engine.renderer.tokenizer
        self._params(None)  # bad defaults stop the actor now, not at the first request
        log.info("engine up: %s", core.bank.kernel_name)
        report = await serve_committed(self, "the checkpoint is not served in its place")
        if report["loaded"]:
            await self._call(lambda: core.discard(previous=True))  # nobody may roll back to it
            log.info("serving committed artifact %s", report["artifact_id"])

    # ---- rollouts

    @concurrent_endpoint
    async def generate(
        self,
        prompt: str | list[int],
        *,
        sampling_params: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> list[Completion]:
        """Sample ``n`` completions of a prompt (text, or token ids).

        Each completion is of one policy version, ``generator_version``; ``metadata`` names its
        artifact, schemes and arm (requests.py). All go to one arm. RequestError for a request that
        is wrong in itself, RequestTimeout past ``request_timeout_s``.
        """
        prompt_ids = token_ids(prompt, self._tokenizer)
        params = self._params(sampling_params)
        submitted = await self._call(lambda: self._core.submit(prompt_ids, params, priority))
        record_metric("generator/generate/count_requests", 1, Reduce.SUM)
        try:
            async with asyncio.timeout(self._request_timeout_s):
                samples = await asyncio.gather(*(asyncio.wrap_future(f) for _, f in submitted))
        except BaseException as error:
            self._abort([request_id for request_id, _ in submitted])
            if isinstance(error, TimeoutError):
                raise RequestTimeout(
                    f"generate: not done within request_timeout_s={self._request_timeout_s}"
                ) from error
            if isinstance(error, EngineDeadError) and self._thread.failed:
                await until_gone()
            raise
        for sample in samples:
            tokens = len(sample.token_ids)
            record_metric("generator/generate/count_sequences_completed", 1, Reduce.SUM)
            record_metric("generator/generate/sum_tokens_generated", tokens, Reduce.SUM)
            record_metric("generator/generate/avg_tokens_generated", tokens, Reduce.MEAN)
            full = float(sample.arm == "companion")
            record_metric("generator/generate/companion_share", full, Reduce.MEAN)
        return [completion(prompt, sample) for sample in samples]

    def _params(self, overrides: Mapping[str, Any] | None) -> list[Any]:
        known = self._tokenizer is not None
        return sampling_params(self._sampling_params, overrides, detokenize=known)

    # ---- slots

    @concurrent_endpoint
    async def stage(self, ref: ArtifactRef) -> StageReport:
        """Load an artifact from the store, verified, into the idle slot, while serving.

        ArtifactError if it does not fit the model; the live slot is not touched either way.
        """
        await self._after_conforming()
        return await self._stage(ref)

    @concurrent_endpoint
    async def accompany(self, ref: ArtifactRef) -> StageReport:
        """Stage the live version in bf16 as companion: from then on it takes the requests that
        admission gives it, until the next ``stage``, ``accompany`` or ``discard`` begins.

        SlotStateError unless it is of the live version and all bf16. The version before is given
        up: a rollback then takes a ``stage`` and a ``commit``.
        """
        await self._after_conforming()
        return await self._stage(ref, companion=True)

    @concurrent_endpoint
    async def probe(self, sequences: list[ProbeSequence]) -> list[ProbeScore]:
        """Score sequences under the idle slot, in steps of its own between live steps."""
        return await self._slot_job(lambda: self._core.probe(sequences))

    @concurrent_endpoint
    async def commit(self, artifact_id: str) -> CommitReport:
        """Flip to the staged artifact; SlotStateError unless it is completely staged."""
        return await self._commit(artifact_id)

    @concurrent_endpoint
    async def rollback(self, artifact_id: str | None = None) -> CommitReport:
        """Flip back to the version that served before; SlotStateError if it is gone, or is not
        ``artifact_id`` where that is given."""
        return await self._call(lambda: self._core.rollback(artifact_id))

    @concurrent_endpoint
    async def discard(self) -> bool:
        """Drop a candidate that never served, one being staged or probed, or a companion; True if
        there was one.

        A ``stage`` or ``probe`` that still runs fails with SlotStateError.
        """
        await self._after_conforming()
        return await self._drop()

    @concurrent_endpoint
    async def conform(self, deadline_s: float | None = None) -> dict[str, Any]:
        """Serve the committed artifact, if something else is served: report of serve_committed.

        Ends what is being staged or probed then; what comes later waits for it. If it fails, or is
        not done within ``deadline_s``, the process ends: the one that comes after it loads the
        committed artifact before it takes requests.
        """
        return await self._conform(deadline_s)

    @concurrent_endpoint
    async def damage_live(self, layer: str | None = None) -> str:
        """Debug: the live slot's weight scales of one layer times 8; returns the layer's name."""
        return await self._call(lambda: self._core.damage_live(layer))

    @concurrent_endpoint
    async def update_weights(self, version: int) -> int:
        """Pull pushed bf16 weights, quantize them by the plan, and serve them; returns version.

        The artifact replaces the committed one in the store: a respawned generator serves it too.
        """
        from forge_ptq import store
        from forge_ptq.engine.quantize import artifact_from_weights

        async with self._update_lock:
            started, discards = time.perf_counter(), self._discards
            state = await store.get_weights(version)
            layout = self._core.bank.layout
            artifact = await asyncio.to_thread(
                artifact_from_weights, layout, state, version, self._plan
            )
            del state
            await self._stage_artifact(artifact, started, discards)
            ref = await store.put_artifact(artifact)
            try:
                await self._commit(ref.artifact_id)
            except BaseException:
                await store.drop_artifact(ref)
                raise
            # Replicas update side by side, each with an artifact of its own; the last one's pointer
            # stays. A replica's own previous artifact may so be another one than the committed.
            replaced = {await store.get_committed(), self._stored}
            self._stored = ref
            await store.set_committed(ref)
            for old in replaced:
                if old is not None:
                    await store.drop_artifact(old)
        return version

    @concurrent_endpoint
    async def get_version(self) -> int:
        """Policy version of new requests."""
        return await self._call(
            lambda: self._core.slots[self._core.live].policy_version or 0,
        )

    @concurrent_endpoint
    async def describe(self) -> dict[str, Any]:
        """Slots, their artifacts and layers, kernel, step times."""
        description = await self._call(self._core.describe)
        return {**description, "pid": os.getpid()}

    @concurrent_endpoint
    async def shutdown_engine(self) -> None:
        """End the engine; pending requests fail. Forge's `stop`: Monarch 0.7 reserves that name."""
        await asyncio.to_thread(self._thread.stop)
