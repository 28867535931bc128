"""What the loop saves when live traffic condemns what has served; over doubles."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from apps.grpo_ptq import main
from apps.grpo_ptq.pacing import RolloutBudget
from apps.grpo_ptq.saving import Saving, restore
from forge_ptq import store
from forge_ptq.config import PTQConfig
from forge_ptq.observe.report import RunReport
from forge_ptq.observe.run_dir import create_run_dir
from tests.integration.publish_doubles import FakeFleet, Generators
from tests.unit.guard.support import LAYERS, launch, records
from tests.unit.test_guard_state import newest, trainer_checkpoint


class Loop:
    """As much of a run as `main.watch` sees, with a checkpoint after step 1."""

    def __init__(self, folder: Any, ptq: Any, monkeypatch: Any) -> None:
        cfg: Any = SimpleNamespace(
            trainer=SimpleNamespace(
                checkpoint=SimpleNamespace(enable=True, interval=1, folder="checkpoint"),
                training=SimpleNamespace(steps=20),
            ),
            ptq=PTQConfig(publish_every=1),
            off_by_n=4,
        )
        self.seen: list[Any] = []
        monkeypatch.setattr(main, "mismatch_records", lambda *_: self.seen)
        self.report = RunReport(create_run_dir(folder, "run", "x.yaml"))
        self.folder = self.report.run_dir.checkpoint("checkpoint")

        async def sequence_mismatch() -> list[Any]:
            return []

        forge: Any = SimpleNamespace(ptq=ptq, sequence_mismatch=sequence_mismatch)
        self.cfg, self.forge, self.ptq = cfg, forge, ptq
        self.saving = Saving(cfg, forge, self.report)
        self.saving.resumed(1)
        trainer_checkpoint(self.folder, 1)

    async def watch(self, seen: list[Any], step: int = 2) -> None:
        self.seen = seen
        self.ptq.fleet.calibration = None  # of no interest here
        budget = RolloutBudget(8, self.cfg.off_by_n)
        await main.watch(self.cfg, self.forge, budget, self.report, self.saving, [], step)

    async def resumed(self, memory: Any) -> Any:
        """What a new session finds committed."""
        await self.saving.close()
        memory.artifacts.clear()
        memory.committed = None
        await restore(self.cfg, self.report)
        return await store.get_committed()


async def served(folder: Any, monkeypatch: Any, **settings: Any) -> tuple[Loop, Any, Any]:
    generators = Generators()
    ptq = await launch(generators, FakeFleet("int8_static", LAYERS), **settings)
    loop = Loop(folder, ptq, monkeypatch)
    first = await ptq.publish(1)
    ptq.fleet.calibration = None
    await loop.saving.guard(1)
    return loop, first, generators.replicas[0]


async def test_what_is_condemned_when_it_serves_no_more_does_not_come_back(
    tmp_path, memory, monkeypatch
):
    loop, first, replica = await served(tmp_path, monkeypatch, guard__on_reject=["bf16"])
    replica.kl = 0.2
    assert (await loop.ptq.publish(2)).outcome == "fell_back"
    await loop.watch(records(first, k3=0.5))
    assert not loop.ptq.rollbacks, "nothing is to be taken back"
    assert await loop.resumed(memory) is None
    state = newest(loop.folder, 1)
    assert first.artifact_id in state.publisher["ladder"]["banned"]
    assert state.publisher["ladder"]["owed"] == 1


async def test_nor_what_could_not_be_taken_back(tmp_path, memory, monkeypatch):
    loop, first, replica = await served(tmp_path, monkeypatch)
    replica.faults["stage"] = RuntimeError("boom")
    await loop.watch(records(first, k3=0.5))
    assert loop.ptq.serving.current.ref.artifact_id == first.artifact_id
    assert await loop.resumed(memory) is None
    assert newest(loop.folder, 1).ref.artifact_id == first.artifact_id, "it is known"


async def test_nor_what_was_being_taken_back_when_the_run_was_interrupted(
    tmp_path, memory, monkeypatch
):
    loop, first, replica = await served(tmp_path, monkeypatch)
    there = asyncio.Event()

    def hang() -> str:
        there.set()
        return "hang"

    replica.faults["stage"] = hang
    task = asyncio.create_task(loop.watch(records(first, k3=0.5)))
    await asyncio.wait_for(there.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await loop.resumed(memory) is None


async def test_what_is_good_comes_back(tmp_path, memory, monkeypatch):
    loop, first, _ = await served(tmp_path, monkeypatch)
    await loop.watch(records(first))
    assert (await loop.resumed(memory)).artifact_id == first.artifact_id
