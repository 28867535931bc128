"""After any sequence of operations the engine says, bit for bit, what the last committed artifact
says on an engine that has never served anything else."""

from __future__ import annotations

import random
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from forge_ptq.artifact import ArtifactError, QuantizedArtifact
from forge_ptq.engine.types import ProbeSequence, SlotStateError
from tests.integration.engine_support import (
    MIXED,
    Harness,
    artifact_of,
    changed,
    hf_state,
    prompts,
    save_qwen3,
    tokens_of,
)

STEPS = {0: 100, 1: 75}
"""By seed."""
ASKED = prompts(3, seed=21)
PLANS: list[dict[str, Any]] = [
    {},
    {"overrides": MIXED},
    {"default": "int8_static"},
    {"default": "bf16"},
]


class Walker:
    """Does operations on an engine, and keeps its own account of what must be where."""

    def __init__(self, harness: Harness, pool: list[QuantizedArtifact], seed: int) -> None:
        self.harness = harness
        self.pool = pool
        self.draw = random.Random(seed)
        self.live = pool[0]
        self.idle: QuantizedArtifact | None = None
        self.role = ""
        self.running: list[tuple[str, Future[Any]]] = []
        self.log: list[str] = []
        harness.publish(pool[0])
        harness.do(lambda: harness.core.discard(previous=True))

    def step(self) -> None:
        """One operation, allowed or not."""
        names = ("stage", "stage", "commit", "commit", "commit_other", "rollback", "discard",
                 "accompany", "damaged", "cancel", "probe", "traffic", "take_up")  # fmt: skip
        name = self.draw.choice(names)
        self.log.append(name)
        getattr(self, name)()

    def stage(self) -> None:
        artifact = self.draw.choice(self.pool)
        self.harness.stage(artifact, self.draw.choice([0.0, 5.0]))
        self.idle, self.role = artifact, "candidate"

    def commit(self) -> None:
        if self.role != "candidate":
            with pytest.raises(SlotStateError):
                self.harness.commit(self.idle or self.pool[0])
            return
        assert self.idle is not None
        self.harness.commit(self.idle)
        self.live, self.idle, self.role = self.idle, self.live, "previous"

    def commit_other(self) -> None:
        other = next(a for a in self.pool if a not in (self.idle, self.live))
        with pytest.raises(SlotStateError):
            self.harness.commit(other)

    def rollback(self) -> None:
        if self.role != "previous":
            with pytest.raises(SlotStateError):
                self.harness.do(self.harness.core.rollback)
            return
        assert self.idle is not None
        self.harness.do(self.harness.core.rollback)
        self.live, self.idle, self.role = self.idle, self.live, "candidate"

    def discard(self) -> None:
        dropped = self.harness.do(self.harness.core.discard)
        assert dropped == (self.role in ("candidate", "companion"))
        if dropped:
            self.idle, self.role = None, ""

    def accompany(self) -> None:
        version = self.live.manifest.policy_version
        twin = next(a for a in self.pool if a.manifest.policy_version == version and is_bf16(a))
        self.harness.accompany(twin)
        self.idle, self.role = twin, "companion"

    def damaged(self) -> None:
        broken = QuantizedArtifact(self.pool[0].manifest, dict(self.pool[0].tensors))
        del broken.tensors["model.norm.weight"]
        with pytest.raises(ArtifactError):
            self.harness.stage(broken)

    def cancel(self) -> None:
        """Discarded in the middle: at whatever piece of the work it happens to be."""
        staging = self.harness.stage_future(self.draw.choice(self.pool), 0.0)
        cancelled = self.harness.do(lambda: self.harness.thread.cancel_job(staging))
        if not cancelled:
            staging.result(10)
        self.harness.do(self.harness.core.discard)
        slot = self.harness.core.slots[self.harness.core.idle]
        if slot.role == "previous":  # it had not begun to clear
            assert self.role == "previous"
        else:
            self.idle, self.role = None, ""

    def probe(self) -> None:
        if self.role in ("candidate", "previous"):
            assert len(self.harness.probe([ProbeSequence(p + p, len(p)) for p in ASKED[:2]])) == 2

    def traffic(self) -> None:
        """Sequences that run on through whatever comes next."""
        for future in self.harness.start(prompts(2, seed=3), max_tokens=40):
            self.running.append((self.live.manifest.artifact_id, future))

    def take_up(self) -> None:
        """What ``conform`` does first; only what a slot holds as candidate or previous."""
        artifact = self.draw.choice(self.pool)
        artifact_id = artifact.manifest.artifact_id
        took = self.harness.do(lambda: self.harness.core.take_up(artifact_id))
        held = artifact is self.idle and self.role in ("candidate", "previous")
        assert took == (artifact is self.live or held)
        if took and artifact is not self.live:
            self.live, self.idle, self.role = artifact, self.live, "retired"

    def settle(self) -> None:
        """Everything that runs ends, on the version it began on or, restarted, on one that was
        live then; never on what was only staged."""
        for artifact_id, future in self.running:
            sample = future.result(60)
            assert sample.resubmitted or sample.artifact_id == artifact_id
        self.running.clear()


def is_bf16(artifact: QuantizedArtifact) -> bool:
    return set(artifact.manifest.layers.values()) == {"bf16"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("model") / "hf", tied=False)


def build_pool(directory: Path) -> list[QuantizedArtifact]:
    """Two versions in four plans each."""
    state = hf_state(directory)
    weights = {version: changed(state, version) for version in (1, 2)}
    return [artifact_of(weights[v], v, **plan) for v in weights for plan in PLANS]


@pytest.fixture(scope="module")
def truth(directory: Path) -> dict[str, Any]:
    """artifact id -> greedy tokens and logprobs, each from a slot filled for the first time or
    after it was emptied, with nothing else ever asked of the engine."""
    pool = build_pool(directory)
    harness = Harness(directory, enable_prefix_caching=False)
    said: dict[str, Any] = {}
    for number, artifact in enumerate(pool):
        harness.publish(artifact)
        harness.do(lambda: harness.core.discard(previous=True))
        said[str(number)] = tokens_of(harness.generate(ASKED))
    harness.thread.stop()
    assert len({str(value) for value in said.values()}) == len(pool)
    return said


@pytest.mark.parametrize("seed", STEPS)
def test_a_random_walk_never_changes_a_bit(
    directory: Path, truth: dict[str, Any], seed: int
) -> None:
    pool = build_pool(directory)
    harness = Harness(directory, enable_prefix_caching=bool(seed))
    walker = Walker(harness, pool, seed)
    visited = set()
    try:
        for _ in range(STEPS[seed]):
            walker.step()
            live = harness.core.slots[harness.core.live]
            assert live.artifact_id == walker.live.manifest.artifact_id, walker.log[-8:]
            assert live.role == "live"
            if walker.draw.random() < 0.4:
                walker.settle()
                number = next(i for i, a in enumerate(pool) if a is walker.live)
                got = harness.generate(ASKED)
                assert {s.artifact_id for s in got} == {live.artifact_id}
                if harness.core.engine.vllm_config.cache_config.enable_prefix_caching:
                    # A cached prefix leaves fewer rows in a GEMM: the tokens alone are exact.
                    assert [s.token_ids for s in got] == [t for t, _ in truth[str(number)]]
                else:
                    assert tokens_of(got) == truth[str(number)], walker.log[-8:]
                visited.add(number)
        walker.settle()
        assert len(visited) >= 4, "the walk stayed in one place"
        assert not harness.core.has_work()
    finally:
        harness.thread.stop()
