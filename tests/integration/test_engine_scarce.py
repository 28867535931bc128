"""Lanes when KV blocks and places are scarce, under the priority policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_ptq.engine.types import ProbeSequence
from tests.integration.engine_support import (
    Harness,
    artifact_of,
    changed,
    hf_state,
    prompts,
    save_qwen3,
)


@pytest.fixture(scope="module")
def scarce(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = save_qwen3(tmp_path_factory.mktemp("model") / "hf", tied=True)
    harness = Harness(
        directory,
        enable_prefix_caching=True,
        num_gpu_blocks_override=10,
        block_size=32,
        max_num_seqs=4,
        max_model_len=128,
        scheduling_policy="priority",
    )
    yield harness, directory
    harness.thread.stop()


def test_preemption_keeps_versions_apart(
    scarce: tuple[Harness, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More sequences than blocks in both lanes, probes among them: all finish, none mixes."""
    harness, directory = scarce
    state = hf_state(directory)
    a, b = artifact_of(changed(state, 1), 1), artifact_of(changed(state, 2), 2)
    asked = prompts(8)
    harness.publish(a)
    alone = [harness.generate([p], max_tokens=60)[0] for p in asked]
    scheduler = harness.core.scheduler
    preempted: list[tuple[int, str]] = []
    preempt = scheduler._preempt_request

    def watched(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append((scheduler.step_slot, request.request_id))
        assert scheduler._slot_of[request.request_id] == scheduler.step_slot
        preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", watched)
    old = harness.start(asked, max_tokens=60)
    harness.publish(b)
    new = harness.start(asked, max_tokens=60)
    done_old = [future.result(120) for future in old]
    done_new = [future.result(120) for future in new]
    monkeypatch.undo()
    assert {old_or_new for old_or_new, _ in preempted} == {0, 1}, "blocks were not scarce"
    assert {s.policy_version for s in done_old} == {1}
    assert {s.policy_version for s in done_new} == {2}
    assert all(len(s.token_ids) == 60 for s in done_old + done_new)
    # greedy first tokens are those of the sequence alone, whatever happened around it
    same = sum(x.token_ids[:8] == y.token_ids[:8] for x, y in zip(alone, done_old, strict=True))
    assert same >= 7
    assert scheduler.lane_counts == [0, 0]
    assert scheduler.kv_cache_manager.usage == 0


def test_probes_get_through_a_full_engine(scarce: tuple[Harness, Path]) -> None:
    """Every place taken by live sequences: probes still make progress, and so do they."""
    harness, directory = scarce
    harness.stage(artifact_of(changed(hf_state(directory), 3), 3))
    live = harness.start(prompts(12, seed=5), max_tokens=70)
    scores = harness.probe([ProbeSequence(p + p, len(p)) for p in prompts(6, seed=6)])
    assert not all(future.done() for future in live)
    assert len(scores) == 6
    assert all(len(future.result(120).token_ids) == 70 for future in live)
    harness.do(harness.core.discard)
