"""Crew over a double of the coordinator: what it does when a round or the coordinator hangs."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from forge_ptq import runtime
from forge_ptq.config import PTQConfig
from forge_ptq.services import crew as crew_module
from forge_ptq.services.candidate import Candidate, Publisher
from forge_ptq.services.coordinator import Coordinator, Member, Report
from forge_ptq.services.crew import Crew, FleetError
from forge_ptq.services.round import Item, WorkRound
from tests.integration.ptq_support import random_rollouts

SILENT = Member("host:41", socket.gethostname(), (41,))


def coordinator(over: bool) -> Any:
    """One whose round is over at once, or never; a replica was silent in it."""
    round_ = WorkRound([Item("a")], 1.0, 10.0, 0.0)
    outcome = replace(round_.outcome(10.0), silent=(SILENT.id,))
    report = Report(outcome, {SILENT.id: SILENT}, {SILENT.id: 99.0})

    async def open_round(*_: Any) -> None:
        return None

    async def wait(*_: Any) -> Report | None:
        await asyncio.sleep(0.01)
        return report if over else None

    async def close(*_: Any) -> Report:
        return report

    endpoints = {"open_round": open_round, "wait": wait, "close": close}
    return SimpleNamespace(**{n: SimpleNamespace(call_one=f) for n, f in endpoints.items()})


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    async def pids(handle: Any) -> list[int]:
        return [41]

    monkeypatch.setattr(runtime, "pids", pids)
    monkeypatch.setattr(Crew, "_kill", staticmethod(lambda member, _: found.append(member.id)))
    return found


def crew(handle: Any) -> Crew:
    async def call(*_: Any) -> None:
        await asyncio.sleep(60)

    return Crew([SimpleNamespace(work=SimpleNamespace(call=call))], handle, 1.0)


async def test_a_silent_replica_is_replaced_even_if_nobody_waits_for_the_round(
    killed: list[str],
) -> None:
    made = crew(coordinator(over=False))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await made.hold("quantize", [Item("a")], 60.0)
    assert killed == [SILENT.id]
    await made.close()


async def test_a_coordinator_that_does_not_answer_is_replaced(
    killed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: Any) -> None:
        await asyncio.sleep(60)

    async def as_actor() -> Any:
        return fresh

    fresh, hung = coordinator(over=True), coordinator(over=True)
    hung.open_round = SimpleNamespace(call_one=hang)
    monkeypatch.setattr(crew_module, "CALL_TIMEOUT_S", 0.1)
    monkeypatch.setattr(Coordinator, "options", lambda **_: SimpleNamespace(as_actor=as_actor))
    made = crew(hung)
    report = await made.hold("quantize", [Item("a")], 60.0)
    assert report.outcome.silent == (SILENT.id,)
    assert made.coordinator is fresh
    await made.close()


async def test_the_fleet_says_what_is_missing_before_the_publisher_gives_up() -> None:
    cfg = PTQConfig()
    cfg.deadlines.quantize_s = cfg.deadlines.probe_s = 0.05

    async def late(*_: Any) -> None:
        await asyncio.sleep(0.2)  # a round ends after its deadline, and says then what is missing
        raise FleetError("part-0 no replica took it")

    fleet = SimpleNamespace(quantize=late, reference=late)
    publisher = Publisher(cfg, None, fleet)
    with pytest.raises(FleetError, match="part-0 no replica took it"):
        await publisher.quantize(Candidate(1))
    with pytest.raises(FleetError, match="part-0 no replica took it"):
        await publisher.probe(Candidate(1), random_rollouts(1))
