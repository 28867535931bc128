"""Versions come and go in the slots; what a version says never changes by a bit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_ptq.engine.types import ProbeSequence
from tests.integration.engine_support import (
    MIXED,
    Harness,
    artifact_of,
    changed,
    hf_state,
    prompts,
    save_llama,
    save_qwen2,
    save_qwen3,
    tokens_of,
)

MODELS: dict[str, tuple[Callable[[Path], Path], bool]] = {
    "qwen3-untied-nocache": (lambda d: save_qwen3(d, tied=False), False),
    "qwen3-untied-cache": (lambda d: save_qwen3(d, tied=False), True),
    "qwen2-tied-biases-nocache": (save_qwen2, False),
    "llama-tied-cache": (save_llama, True),
}


class Served:
    """An engine and the state dict it was started from."""

    def __init__(self, name: str, directory: Path) -> None:
        make, caching = MODELS[name]
        make(directory)
        self.state = hf_state(directory)
        self.caching = caching
        self.harness = Harness(directory, enable_prefix_caching=caching)

    def artifact(self, seed: int, **plan: Any) -> Any:
        return artifact_of(changed(self.state, seed), seed, **plan)


@pytest.fixture(scope="module", params=list(MODELS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    served = Served(request.param, tmp_path_factory.mktemp("model") / "hf")
    yield served
    served.harness.thread.stop()


@pytest.fixture
def harness(served: Served) -> Iterator[Harness]:
    yield served.harness
    assert served.harness.thread.alive


def test_rollback_restores_every_bit(served: Served, harness: Harness) -> None:
    """A, then B, then back: A again; the three schemes side by side, the rest changed too."""
    asked = prompts(6, seed=1)
    a = served.artifact(1, default="int8_dynamic", overrides=MIXED)
    b = served.artifact(2, default="int8_dynamic")
    harness.publish(a)
    harness.generate(asked)  # with prefix caching on, the next ones start from the same cache
    first = harness.generate(asked)
    assert {s.policy_version for s in first} == {1}
    assert {s.scheme_tag for s in first} == {"int8_dynamic+int8_static+bf16"}
    harness.publish(b)
    second = harness.generate(asked)
    assert {s.artifact_id for s in second} == {b.manifest.artifact_id}
    assert all(x != y for x, y in zip(tokens_of(first), tokens_of(second), strict=True))
    report = harness.do(harness.core.rollback)
    assert report.artifact_id == a.manifest.artifact_id
    assert tokens_of(harness.generate(asked)) == tokens_of(first)


def test_a_version_is_the_same_in_either_slot(served: Served, harness: Harness) -> None:
    """The same tensors published twice land in different slots and say the same."""
    asked = prompts(5, seed=2)
    one, two = served.artifact(3, overrides=MIXED), served.artifact(3, overrides=MIXED)
    harness.publish(one)
    first = harness.generate(asked)
    harness.publish(two)
    second = harness.generate(asked)
    assert {s.slot for s in first} != {s.slot for s in second}
    assert tokens_of(first) == tokens_of(second)


def test_bf16_artifact_equals_a_fresh_engine_slot(served: Served, harness: Harness) -> None:
    """The unchanged checkpoint as a bf16 artifact says what slot 0 said at start-up."""
    asked = prompts(4, seed=3)
    harness.publish(artifact_of(served.state, 9, default="bf16"))
    got = harness.generate(asked)
    harness.publish(served.artifact(4))
    harness.publish(artifact_of(served.state, 10, default="bf16"))
    again = harness.generate(asked)
    assert {s.scheme_tag for s in got} == {"bf16"}
    assert tokens_of(got) == tokens_of(again)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seed"])
def test_publishing_in_flight_changes_no_token(
    served: Served, harness: Harness, sampling: dict[str, Any]
) -> None:
    """Stage, probe and commit while 16 sequences run: all finish on their version, unchanged."""
    harness.publish(served.artifact(5, overrides=MIXED))
    asked = prompts(16, seed=4)
    harness.generate(asked, max_tokens=100, **sampling)
    control = harness.generate(asked, max_tokens=100, **sampling)
    next_one = served.artifact(6)

    running = harness.start(asked, max_tokens=100, **sampling)
    begun = harness.core.stats.steps
    while harness.core.stats.steps < begun + 5:
        time.sleep(0.001)
    staged = harness.stage(next_one)
    scores = harness.probe([ProbeSequence(p + p, len(p)) for p in asked[:4]])
    committed = harness.commit(next_one)
    assert not any(future.done() for future in running), "the run was too short to be in flight"
    newer = harness.generate(asked[:4], max_tokens=4, **sampling)
    finished = [future.result(60) for future in running]

    assert tokens_of(finished) == tokens_of(control)
    assert {s.policy_version for s in finished} == {5}
    assert {s.policy_version for s in newer} == {6}
    assert len(scores) == 4
    assert committed.draining == 16
    assert staged.drain_s < 1.0
    assert committed.pause_s < 1.0


def test_logprobs_are_of_the_sampled_distribution(served: Served, harness: Harness) -> None:
    """With one token allowed it is certain; temperature changes logprobs of the same token."""
    asked = prompts(3, seed=5)
    sure = harness.generate(asked, max_tokens=2, temperature=1.0, allowed_token_ids=[17])
    assert all(s.token_ids == [17, 17] for s in sure)
    assert all(value == pytest.approx(0.0, abs=1e-6) for s in sure for value in s.logprobs)
    two = {"max_tokens": 1, "allowed_token_ids": [17, 18], "seed": 1}
    warm = harness.generate(asked, temperature=1.0, **two)
    hot = harness.generate(asked, temperature=2.0, **two)
    for x, y in zip(warm, hot, strict=True):
        odds = math.exp(x.logprobs[0]) / (1 - math.exp(x.logprobs[0]))
        if x.token_ids == y.token_ids:  # odds at twice the temperature are the square root
            assert math.exp(y.logprobs[0]) == pytest.approx(odds**0.5 / (1 + odds**0.5), abs=1e-3)
