"""The runtime's contract: services. Against every implementation that can be imported."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from forge_ptq.runtime import QueueFull, RequestTimeout, ServiceUnavailable
from tests.integration.runtime_support import eventually, worker

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


async def test_requests_go_round(rt: Any) -> None:
    service = await worker(rt).options(num_replicas=2).as_service()
    order = [await service.pid.route() for _ in range(4)]
    assert order[:2] == order[2:]
    assert sorted(order[:2]) == sorted(await rt.pids(service))


async def test_least_loaded_routing_passes_over_the_busy_replica(rt: Any) -> None:
    options = {"num_replicas": 2, "routing": "least_loaded"}
    service = await worker(rt).options(**options).as_service()
    busy = asyncio.create_task(service.wait.route(1.5))
    await asyncio.sleep(0.3)
    others = {await service.wait.route(0.0) for _ in range(4)}
    assert len(others) == 1
    assert await busy not in others


async def test_one_replica_works_on_many_requests_at_a_time(rt: Any) -> None:
    service = await worker(rt).options(replica_max_concurrent_requests=20).as_service()
    started = time.monotonic()
    await asyncio.gather(*(service.wait.route(0.5) for _ in range(20)))
    assert time.monotonic() - started < 2.5  # one after the other: 10 s


async def test_sessions_stick_to_a_replica_and_survive_its_death(rt: Any) -> None:
    service = await worker(rt).options(num_replicas=2).as_service()
    async with service.session() as session:
        assert session.session_id
        values = [await service.add.route(1) for _ in range(3)]
        assert values == [1, 2, 3]
        pinned = {await service.pid.route() for _ in range(3)}
        assert len(pinned) == 1
        os.kill(pinned.pop(), signal.SIGKILL)
        moved = {await service.pid.route() for _ in range(3)}
        assert len(moved) == 1
    session_id = await service.start_session()
    assert len({await service.pid.route(sess_id=session_id) for _ in range(3)}) == 1
    await service.terminate_session(session_id)
    assert len({await service.pid.route() for _ in range(4)}) >= 1


async def test_fanout_reaches_every_healthy_replica(rt: Any) -> None:
    service = await worker(rt).options(num_replicas=2).as_service()
    first, second = await rt.pids(service)
    assert await service.pid.fanout() == [first, second]
    os.kill(first, signal.SIGKILL)
    answers = await service.pid.fanout()
    assert [pid for pid in answers if pid is not None] == [second]


async def test_exception_of_an_endpoint_is_neither_retried_nor_changed(
    rt: Any, tmp_path: Path
) -> None:
    service = await worker(rt).options(num_replicas=2).as_service()
    calls = tmp_path / "calls"
    with pytest.raises(ValueError, match=r"^bad prompt$"):
        await service.fail.route(str(calls))
    assert calls.read_text() == "called\n"
    with pytest.raises(ValueError, match=r"^bad prompt$"):
        await service.fail.fanout(str(calls))


async def test_request_survives_the_death_of_its_replica(rt: Any) -> None:
    service = await worker(rt).options(num_replicas=2).as_service()
    victim, survivor = await rt.pids(service)
    requests = [asyncio.create_task(service.wait.route(1.0)) for _ in range(4)]
    await asyncio.sleep(0.3)
    os.kill(victim, signal.SIGKILL)
    assert set(await asyncio.gather(*requests)) == {survivor}

    async def respawned() -> bool:
        pids = await rt.pids(service)
        return len(pids) == 2 and victim not in pids and len(await service.pid.fanout()) == 2

    await eventually(respawned)
    assert await service.is_ready.fanout() == [True, True]


async def test_single_replica_is_waited_for(rt: Any) -> None:
    service = await worker(rt).options(unavailable_timeout_s=30).as_service(7)
    respawns: list[int] = []

    async def restore(replica: int, actor: Any) -> None:
        await actor.add.call_one(100)
        respawns.append(replica)

    service.on_respawn(restore)
    (victim,) = await rt.pids(service)
    request = asyncio.create_task(service.wait.route(0.5))
    await asyncio.sleep(0.2)
    os.kill(victim, signal.SIGKILL)
    answered_by = await request
    assert answered_by != victim
    assert await rt.pids(service) == [answered_by]
    assert await service.add.route(0) == 107
    assert respawns == [0]


async def test_service_that_does_not_come_back_is_unavailable(rt: Any, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    options = {"unavailable_timeout_s": 3.0}
    service = await worker(rt).options(**options).as_service(fail_setup_if=str(flag))
    flag.touch()
    os.kill((await rt.pids(service))[0], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(ServiceUnavailable, match=r"Worker\.pid.*unavailable_timeout_s"):
        await service.pid.route()
    assert time.monotonic() - started < 15


async def test_queue_is_bounded(rt: Any) -> None:
    options = {"replica_max_concurrent_requests": 1, "max_queued_requests": 2}
    service = await worker(rt).options(**options).as_service()
    requests = [service.wait.route(0.2) for _ in range(8)]
    results = await asyncio.gather(*requests, return_exceptions=True)
    refused = [result for result in results if isinstance(result, QueueFull)]
    assert len(refused) == 5
    assert sum(isinstance(result, int) for result in results) == 3
    assert "max_queued_requests = 2" in str(refused[0])
    assert isinstance(await service.wait.route(0.0), int)


async def test_request_has_a_deadline(rt: Any) -> None:
    service = await worker(rt).options(request_timeout_s=1.0).as_service()
    started = time.monotonic()
    with pytest.raises(RequestTimeout, match=r"Worker\.wait.*1 s"):
        await service.wait.route(30)
    assert time.monotonic() - started < 4
    assert isinstance(await service.wait.route(0.0), int)


async def test_services_refuse_the_adverbs_of_actors(rt: Any) -> None:
    service = await worker(rt).as_service()
    with pytest.raises(AttributeError, match=r"route\(\) and fanout\(\)"):
        service.pid.call_one()
