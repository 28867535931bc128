"""QuantizedGenerator: a drop-in for Forge's Generator that serves two weight slots.

    policy = await QuantizedGenerator.options(...).as_service(engine_args={...},
                                                              sampling_params={...})
    completions = await policy.generate.route(prompt)        # n of them, each of one version

with PTQ services (they quantize; this actor stages, is probed, and flips):

    await policy.stage.fanout(ref)              # idle slot, while the live one serves
    scores = await policy.probe.route(sequences)
    await policy.commit.fanout(ref.artifact_id) # or discard; later rollback

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

from forge_ptq.engine.leaving import die, leave, until_gone
from forge_ptq.engine.types import (
    CommitReport,
    EngineDeadError,
    ProbeScore,
    ProbeSequence,
    RequestError,
    Sample,
    SlotStateError,
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
    from forge_ptq.artifact import ArtifactRef, QuantizedArtifact
    from forge_ptq.engine.core import SlotEngine
    from forge_ptq.engine.thread import EngineThread

log = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 120.0
JOB_TIMEOUT_S = 3600.0


class QuantizedGenerator(ForgeActor):
    """See the module.

    Args:
        engine_args: vLLM's EngineArgs by name. ``model`` is a local HF checkpoint in bf16, served
            from slot 0 as version 0 until something else is committed.
        sampling_params: defaults of ``generate``, vLLM's SamplingParams by name.
        request_timeout_s: a generate call older than this is aborted, RequestTimeout.
        drain_deadline_s: how long ``stage`` waits for the idle slot's last sequences before it
            restarts them on the live slot.
        plan: {"default": scheme, "overrides": {pattern: scheme}} of ``update_weights``.
        idle_lane_tokens: most prompt tokens of a probe step while live sequences wait; None: 64 on
            CPU, 1024 on CUDA.
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
    ) -> None:
        self._engine_args = dict(engine_args or {})
        self._sampling_params = dict(sampling_params or {})
        self._request_timeout_s = request_timeout_s
        self._drain_deadline_s = drain_deadline_s
        self._plan = dict(plan or {})
        self._idle_lane_tokens = idle_lane_tokens
        self._thread: EngineThread
        self._core: SlotEngine
        self._tokenizer: Any = None
        self._slot_jobs: set[Future[Any]] = set()
        self._stored: ArtifactRef | None = None
        self._discards = 0
        self._update_lock = asyncio.Lock()

    @endpoint
    async def setup(self) -> None:
        """Build the engine; serve what the store says is committed, else the checkpoint."""
        from forge_ptq.engine.build import build_engine, set_environment

        set_environment()
        from forge_ptq.engine.core import SlotEngine
        from forge_ptq.engine.thread import EngineThread

        def build() -> SlotEngine:
            engine = build_engine(self._engine_args)
            return SlotEngine(engine, idle_lane_tokens=self._idle_lane_tokens)

        self._thread = EngineThread(build, on_death=die)
        core = await asyncio.to_thread(self._thread.start, START_TIMEOUT_S)
        assert isinstance(core, SlotEngine)
        self._core = core
        atexit.register(leave)
        self._tokenizer = core.engine.renderer.tokenizer
        self._params(None)  # bad defaults stop the actor now, not at the first request
        log.info("engine up: %s", core.bank.kernel_name)
        ref = await _committed()
        if ref is not None:
            await self._stage(ref)
            await self._commit(ref.artifact_id)
            log.info("serving committed artifact %s", ref.artifact_id)

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
        artifact and schemes. RequestError for a request that is wrong in itself, RequestTimeout
        past ``request_timeout_s``.
        """
        prompt_ids = self._token_ids(prompt)
        params = self._params(sampling_params)
        submitted = await self._call(lambda: self._core.submit(prompt_ids, params, priority))
        record_metric("generator/generate/count_requests", 1, Reduce.SUM)
        try:
            async with asyncio.timeout(self._request_timeout_s):
                samples = await asyncio.gather(*(asyncio.wrap_future(f) for _, f in submitted))
        except BaseException as error:
            ids = [request_id for request_id, _ in submitted]
            self._thread.call(lambda: self._core.abort(ids))
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
        return [_completion(prompt, sample) for sample in samples]

    def _token_ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError("the prompt is text, but the model has no tokenizer: pass ids")
            prompt = self._tokenizer.encode(prompt)
        return [int(token) for token in prompt]

    def _params(self, overrides: Mapping[str, Any] | None) -> list[Any]:
        """One vLLM SamplingParams per sample; RequestError names what is wrong."""
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        merged = {**self._sampling_params, **(overrides or {})}
        count = merged.pop("n", 1)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise RequestError(f"sampling_params.n must be a positive integer, got {count!r}")
        merged["logprobs"] = merged.get("logprobs") or 0
        merged["output_kind"] = RequestOutputKind.FINAL_ONLY
        if self._tokenizer is None:
            merged["detokenize"] = False
        seed = merged.pop("seed", None)
        try:
            return [
                SamplingParams(**merged, seed=None if seed is None else seed + index)
                for index in range(count)
            ]
        except (TypeError, ValueError, VLLMClientError) as error:
            raise RequestError(f"sampling_params: {error}") from error

    # ---- slots

    @concurrent_endpoint
    async def stage(self, ref: ArtifactRef) -> StageReport:
        """Load an artifact from the store, verified, into the idle slot, while serving.

        ArtifactError if it does not fit the model; the live slot is not touched either way.
        """
        return await self._stage(ref)

    async def _stage(self, ref: ArtifactRef) -> StageReport:
        from forge_ptq import store

        started, discards = time.perf_counter(), self._discards
        artifact = await store.get_artifact(ref)
        return await self._stage_artifact(artifact, started, discards)

    async def _stage_artifact(
        self, artifact: QuantizedArtifact, started: float, discards: int
    ) -> StageReport:
        from forge_ptq.engine.core import Candidate

        plan = await asyncio.to_thread(self._core.bank.layout.plan, artifact)
        manifest = artifact.manifest
        load_s = time.perf_counter() - started
        candidate = Candidate(
            manifest.artifact_id, manifest.policy_version, plan, load_s=load_s, started=started
        )
        if discards != self._discards:
            raise SlotStateError(f"{manifest.artifact_id} was discarded before it was staged")
        report = await self._slot_job(lambda: self._core.stage(candidate, self._drain_deadline_s))
        record_metric("generator_perf/stage/stage_s", report.stage_s, Reduce.MAX)
        return report

    @concurrent_endpoint
    async def probe(self, sequences: list[ProbeSequence]) -> list[ProbeScore]:
        """Score sequences under the idle slot, in steps of its own between live steps."""
        return await self._slot_job(lambda: self._core.probe(sequences))

    @concurrent_endpoint
    async def commit(self, artifact_id: str) -> CommitReport:
        """Flip to the staged artifact; SlotStateError unless it is completely staged."""
        return await self._commit(artifact_id)

    async def _commit(self, artifact_id: str) -> CommitReport:
        report = await self._call(lambda: self._core.commit(artifact_id))
        record_metric("generator_perf/commit/pause_s", report.pause_s, Reduce.MAX)
        return report

    @concurrent_endpoint
    async def rollback(self) -> CommitReport:
        """Flip back to the version that served before; SlotStateError if it is gone."""
        return await self._call(self._core.rollback)

    @concurrent_endpoint
    async def discard(self) -> bool:
        """Drop a candidate that never served, one being staged or probed; True if there was one.

        A ``stage`` or ``probe`` that still runs fails with SlotStateError.
        """
        self._discards += 1

        def drop() -> bool:
            cancelled = [self._thread.cancel_job(job) for job in list(self._slot_jobs)]
            return self._core.discard() or any(cancelled)

        return await self._call(drop)

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

    # ---- the engine thread

    async def _slot_job(self, make: Any) -> Any:
        """Run a job on the idle slot, which ``discard`` may cut short."""
        job = self._thread.run_job(make)
        self._slot_jobs.add(job)
        job.add_done_callback(self._slot_jobs.discard)
        return await self._result(job, JOB_TIMEOUT_S)

    async def _call(self, function: Any) -> Any:
        return await self._result(self._thread.call(function), CALL_TIMEOUT_S)

    async def _result(self, future: Future[Any], limit_s: float) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.wrap_future(future)
        except EngineDeadError:
            if self._thread.failed:
                await until_gone()
            raise


async def _committed() -> ArtifactRef | None:
    """The committed artifact; None without a store, so that the actor also runs alone."""
    from forge_ptq import store

    try:
        return await store.get_committed()
    except store.StoreNotRunning:
        return None


def _completion(prompt: str | list[int], sample: Sample) -> Completion:
    import torch

    return Completion(
        prompt=prompt,
        text=sample.text,
        prompt_ids=torch.tensor(sample.prompt_ids, dtype=torch.int64),
        token_ids=torch.tensor(sample.token_ids, dtype=torch.int64),
        logprobs=torch.tensor(sample.logprobs, dtype=torch.float32),
        stop_reason=sample.stop_reason,
        generator_version=sample.policy_version,
        metadata={
            "artifact_id": sample.artifact_id,
            "scheme": sample.scheme_tag,
            "slot": sample.slot,
            "resubmitted": sample.resubmitted,
            "latency_s": sample.queue_to_done_s,
        },
    )
