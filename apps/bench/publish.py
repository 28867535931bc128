"""A publish while sequences run: stage, probe, commit, with the times that the engine saw."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from apps.bench.checkpoints import quantize_checkpoint
from apps.bench.worker import bench_prompts
from forge_ptq.engine.types import CommitReport, ProbeScore, ProbeSequence, StageReport

DEADLINE_S = 600.0


class Publisher:
    """A SlotEngine on its thread; every ``measure`` publishes one version under load."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from forge_ptq.engine.build import build_engine
        from forge_ptq.engine.core import SlotEngine
        from forge_ptq.engine.thread import EngineThread

        self.arguments = arguments
        args = arguments["engine_args"]
        self.thread = EngineThread(
            lambda: SlotEngine(build_engine(args), idle_lane_tokens=arguments["idle_lane_tokens"])
        )
        core = self.thread.start(DEADLINE_S)
        assert isinstance(core, SlotEngine)
        self.core = core
        self.version = 0
        self.about = {"kind": "publish", "kernel": core.bank.kernel_name}
        self.prompts = bench_prompts(
            arguments["sequences"], arguments["prompt_tokens"], core.vocab_size
        )
        self._start(8)
        self._wait()

    def _start(self, max_tokens: int) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.running: list[Future[Any]] = self.thread.call(
            lambda: [self.core.submit(prompt, [params])[0][1] for prompt in self.prompts]
        ).result(DEADLINE_S)

    def _wait(self) -> None:
        for future in self.running:
            future.result(DEADLINE_S)

    def measure(self) -> dict[str, Any]:
        """Start sequences, publish the next version, let everything finish."""
        from forge_ptq.engine.staging import Candidate

        self.version += 1
        model = Path(self.arguments["engine_args"]["model"])
        artifact = quantize_checkpoint(
            model, **self.arguments["plan"], absmax=self.arguments["absmax"], version=self.version
        )
        candidate = Candidate(
            artifact.manifest.artifact_id, self.version, self.core.bank.layout.plan(artifact)
        )
        self._start(self.arguments["max_tokens"])
        staged: StageReport = self.thread.run_job(
            lambda: self.core.stage(candidate, DEADLINE_S)
        ).result(DEADLINE_S)
        half = self.arguments["prompt_tokens"] // 2
        sequences = [ProbeSequence(p, half) for p in self.prompts[: self.arguments["probes"]]]
        scores: list[ProbeScore] = self.thread.run_job(lambda: self.core.probe(sequences)).result(
            DEADLINE_S
        )
        report: CommitReport = self.thread.call(
            lambda: self.core.commit(candidate.artifact_id)
        ).result(DEADLINE_S)
        in_flight = sum(not future.done() for future in self.running)
        self._wait()
        return {
            "stage_s": staged.fill_s,
            "stage_busy_s": staged.busy_s,
            "bytes": staged.bytes,
            "probe_tokens": sum(len(score.logprobs) for score in scores),
            "flip_s": report.flip_s,
            "pause_s": report.pause_s,
            "step_s_median": report.step_s_median,
            "in_flight_at_commit": in_flight,
        }
