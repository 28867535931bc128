"""Conforming to the pointer: its deadline, and what waits for it."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from forge_ptq.artifact import ArtifactRef
from forge_ptq.engine import calls
from forge_ptq.engine.calls import EngineCalls
from forge_ptq.engine.generator import QuantizedGenerator
from forge_ptq.engine.thread import EngineThread
from forge_ptq.engine.types import SlotStateError


class Generator(EngineCalls):
    """Loading takes until ``go`` is set; what fills or empties the idle slot is noted."""

    def __init__(self) -> None:
        self._update_lock = asyncio.Lock()
        self._conformed = asyncio.Event()
        self._conformed.set()
        self.go, self.there = asyncio.Event(), asyncio.Event()
        self.log: list[str] = []

    async def take_up(self, artifact_id: str | None) -> bool:
        return "loaded" in self.log

    async def load(self, ref: ArtifactRef) -> None:
        self.there.set()
        await self.go.wait()
        self.log.append("loaded")

    async def _stage(self, ref: ArtifactRef, companion: bool = False) -> Any:
        self.log.append("accompany" if companion else "stage")

    async def _drop(self) -> bool:
        self.log.append("discard")
        return True

    async def ask(self, endpoint: str, *args: Any) -> Any:
        """As the actor runs it."""
        return await inspect.unwrap(getattr(QuantizedGenerator, endpoint)._method)(self, *args)


@pytest.fixture
def died(monkeypatch):
    causes: list[BaseException] = []

    async def committed() -> ArtifactRef:
        return ArtifactRef("one", 1)

    monkeypatch.setattr("forge_ptq.engine.committed.committed", committed)
    monkeypatch.setattr(calls, "die", lambda error, why: causes.append(error))
    return causes


@pytest.mark.parametrize(
    ("endpoint", "args"),
    [("stage", (ArtifactRef("two", 2),)), ("accompany", (ArtifactRef("two", 2),)), ("discard", ())],
)
async def test_what_fills_the_idle_slot_waits_for_a_conform_under_way(died, endpoint, args):
    generator = Generator()
    conforming = asyncio.create_task(generator.ask("conform", 10.0))
    await asyncio.wait_for(generator.there.wait(), 5)
    other = asyncio.create_task(generator.ask(endpoint, *args))
    await asyncio.sleep(0.02)
    assert generator.log == []
    generator.go.set()
    assert (await asyncio.wait_for(conforming, 5))["loaded"] is True
    await asyncio.wait_for(other, 5)
    assert generator.log == ["loaded", endpoint]
    assert died == []


async def test_waiting_for_it_has_a_limit(died, monkeypatch):
    monkeypatch.setattr(calls, "CONFORMED_WITHIN_S", 0.02)
    generator = Generator()
    conforming = asyncio.create_task(generator.ask("conform", 10.0))
    await asyncio.wait_for(generator.there.wait(), 5)
    with pytest.raises(SlotStateError, match="still being loaded"):
        await generator.ask("stage", ArtifactRef("two", 2))
    generator.go.set()
    await asyncio.wait_for(conforming, 5)
    await generator.ask("stage", ArtifactRef("two", 2))


async def test_past_its_deadline_the_process_ends(died):
    generator = Generator()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(generator.ask("conform", 0.02), 5)
    assert [type(error) for error in died] == [TimeoutError]


async def test_the_deadline_counts_while_an_update_of_the_weights_is_under_way(died):
    generator = Generator()
    async with generator._update_lock:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(generator.ask("conform", 0.02), 5)
    assert len(died) == 1


@pytest.mark.parametrize("dead", [False, True])
def test_an_abort_that_nobody_waits_for_and_that_fails_is_logged(caplog, dead):
    class Engine:
        def has_work(self) -> bool:
            return False

        def fail_all(self, error: BaseException) -> None: ...

        def close(self) -> None: ...

        def abort(self, request_ids: list[str]) -> None:
            raise KeyError(request_ids[0])

    engine: Any = Engine()
    generator = Generator()
    generator._core, generator._thread = engine, EngineThread(lambda: engine)
    generator._thread.start(10)
    if dead:
        generator._thread.stop()
    generator._abort(["gen-7"])
    if not dead:
        generator._thread.stop()
    assert ("gen-7" in caplog.text) == (not dead), "an engine that has ended tells that itself"
