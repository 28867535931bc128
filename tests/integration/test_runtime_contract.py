"""The runtime's contract: our own runtime always, and real torchforge where it can be imported.

Actors are defined inside functions: spawned processes get such classes by value, and so need not
be able to import this file.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from forge_ptq.runtime import (
    ActorDied,
    QueueFull,
    RequestTimeout,
    ServiceUnavailable,
    concurrent_endpoint,
    endpoint,
    shims,
)
from forge_ptq.runtime.own.death import ProcessId

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


def available() -> list[str]:
    """Implementations to test: FORGE_PTQ_RUNTIME's, else all that can be imported."""
    choice = os.environ.get("FORGE_PTQ_RUNTIME", "")
    if choice:
        return [choice]
    found = importlib.util.find_spec("forge") is not None
    return ["own", "torchforge"] if found else ["own"]


@pytest_asyncio.fixture(loop_scope="module", params=available())
async def rt(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """One implementation; everything that the test spawned is ended afterwards."""
    shims.install()
    runtime = importlib.import_module(f"forge_ptq.runtime.{request.param}")
    yield runtime
    await runtime.shutdown()


def worker(rt: Any) -> Any:
    """An actor class with one endpoint for each thing a test needs."""
    record_metric, reduce_kind = rt.record_metric, rt.Reduce

    def exists(path: str) -> bool:
        return os.path.exists(path)

    def append(path: str, text: str) -> None:
        with open(path, "a") as file:
            file.write(text)

    class Worker(rt.ForgeActor):
        def __init__(self, value: int = 0, fail_setup_if: str = "") -> None:
            self.value = value
            self.fail_setup_if = fail_setup_if
            self.calls = 0
            self.ready = False

        @endpoint
        async def setup(self) -> None:
            if self.fail_setup_if and exists(self.fail_setup_if):
                raise OSError("no such checkpoint")
            self.ready = True

        @endpoint
        async def pid(self) -> int:
            return os.getpid()

        @endpoint
        async def is_ready(self) -> bool:
            return self.ready

        @endpoint
        async def add(self, amount: int, times: int = 1) -> int:
            self.value += amount * times
            return self.value

        @endpoint
        async def fail(self, path: str) -> None:
            append(path, "called\n")
            raise ValueError("bad prompt")

        @concurrent_endpoint
        async def wait(self, seconds: float) -> int:
            await asyncio.sleep(seconds)
            return os.getpid()

        @endpoint
        async def environment(self, key: str) -> tuple[str | None, int]:
            return os.environ.get(key), sys.flags.optimize

        @endpoint
        async def rank(self) -> tuple[str, str]:
            return os.environ["RANK"], os.environ["WORLD_SIZE"]

        @endpoint
        async def speak(self) -> None:
            print("spoken by python", flush=True)
            os.write(2, b"spoken by native code\n")

        @endpoint
        async def ask(self, other: Any) -> int:
            return await other.pid.call_one()

        @endpoint
        async def measure(self, values: dict[str, list[float]]) -> None:
            for kind, numbers in values.items():
                for number in numbers:
                    record_metric(f"x/{kind}", number, reduce_kind(kind))

    return Worker


def alive(pids: list[int]) -> list[int]:
    """Those of `pids` that still run."""
    return [pid for pid in pids if ProcessId.of(pid).alive()]


async def eventually(condition: Any, timeout_s: float = 20.0) -> None:
    """Waits until the coroutine function `condition` is true."""
    for _ in range(round(timeout_s / 0.05)):
        if await condition():
            return
        await asyncio.sleep(0.05)
    raise TimeoutError(f"not so within {timeout_s:g} s: {condition}")


# actors


async def test_actor_calls_and_arguments(rt: Any) -> None:
    actor = await worker(rt).options(procs=2).as_actor(5)
    assert [rank async for rank in _values(actor.rank)] == [("0", "2"), ("1", "2")]
    added = await actor.add.call(2, times=3)
    assert [value for _, value in added.items()] == [11, 11]
    assert [value for _, value in (await actor.is_ready.call()).items()] == [True, True]
    assert len(set(await rt.pids(actor))) == 2


async def _values(an_endpoint: Any) -> AsyncIterator[Any]:
    for _, value in (await an_endpoint.call()).items():
        yield value


async def test_handles_can_be_sent_to_other_actors(rt: Any) -> None:
    first, second = [await worker(rt).options(colocate="pair").as_actor() for _ in range(2)]
    third = await worker(rt).as_actor()
    assert await third.ask.call_one(first) == await second.pid.call_one()


async def test_exception_of_an_actor_reaches_the_caller_as_it_is(rt: Any, tmp_path: Path) -> None:
    actor = await worker(rt).as_actor()
    with pytest.raises(ValueError, match=r"^bad prompt$"):
        await actor.fail.call_one(str(tmp_path / "calls"))
    assert await actor.add.call_one(1) == 1


async def test_exception_in_setup_reaches_the_caller_and_leaves_no_process(
    rt: Any, tmp_path: Path
) -> None:
    before = _children()
    with pytest.raises(OSError, match="no such checkpoint"):
        await worker(rt).as_actor(fail_setup_if=str(tmp_path))
    assert alive(sorted(_children() - before)) == []


async def test_death_of_an_actor_is_told_within_a_second(rt: Any) -> None:
    actor = await worker(rt).options(mesh_name="mortal").as_actor()
    (pid,) = await rt.pids(actor)
    call = asyncio.create_task(actor.wait.call_one(60))
    await asyncio.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(ActorDied, match=rf"Worker\.wait: process {pid} of mortal died"):
        await call
    assert time.monotonic() - started < 1.0
    with pytest.raises(ActorDied, match=str(pid)):
        await actor.pid.call_one()


async def test_colocated_actors_share_a_process_until_the_last_one_ends(rt: Any) -> None:
    light = worker(rt).options(colocate="light")
    one, two = await light.as_actor(1), await light.as_actor(2)
    with pytest.raises(ValueError, match="'light' runs already, without env"):
        await light.options(env={"KNOB": "1"}).as_actor()
    apart = await worker(rt).as_actor()
    assert await rt.pids(one) == await rt.pids(two) == [await one.pid.call_one()]
    assert await rt.pids(apart) != await rt.pids(one)
    await light.shutdown(one)
    assert await two.add.call_one(1) == 3
    await light.shutdown(two)
    await eventually(lambda: _async(not alive(two.processes.pids)))


async def _async(value: Any) -> Any:
    return value


async def test_environment_is_per_mesh_and_there_before_python(rt: Any) -> None:
    plain = await worker(rt).as_actor()
    tuned = await worker(rt).options(env={"KNOB": "1", "PYTHONOPTIMIZE": "1"}).as_actor()
    assert await plain.environment.call_one("KNOB") == (None, 0)
    assert await tuned.environment.call_one("KNOB") == ("1", 1)
    assert "KNOB" not in os.environ


async def test_output_of_a_process_goes_to_the_log_file_of_its_mesh(
    rt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORGE_PTQ_LOG_DIR", str(tmp_path / "logs"))
    actor = await worker(rt).options(mesh_name="talker").as_actor()
    await actor.speak.call_one()
    text = (tmp_path / "logs" / "talker.log").read_text()
    assert "spoken by python\n" in text
    assert "spoken by native code\n" in text
    assert "spoken" not in "".join(capfd.readouterr())


async def test_unknown_option_is_an_error(rt: Any) -> None:
    with pytest.raises(TypeError, match="num_replica'"):
        worker(rt).options(num_replica=2)


# services


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


# metrics


async def test_metrics_of_three_processes_are_reduced_as_one_sample(
    rt: Any, caplog: pytest.LogCaptureFixture
) -> None:
    actors = [await worker(rt).as_actor() for _ in range(3)]
    logger = await rt.get_or_create_metric_logger(process_name="Controller")
    await logger.init_backends.call_one({"console": {"logging_mode": "global_reduce"}})
    rng = np.random.default_rng(0)
    kinds = ("mean", "sum", "max", "min", "std")
    samples = {kind: [rng.normal(50, 3, size=n) for n in (3, 7, 20, 4)] for kind in kinds}
    for i, actor in enumerate(actors):
        await actor.measure.call_one({kind: samples[kind][i].tolist() for kind in kinds})
    for kind in kinds:
        for value in samples[kind][3]:
            rt.record_metric(f"x/{kind}", value, rt.Reduce(kind))
    with caplog.at_level("INFO"):
        reduced = await logger.flush.call_one(1)
    for kind in kinds:
        expected = getattr(np, kind)(np.concatenate(samples[kind]))
        assert reduced[f"x/{kind}"] == pytest.approx(expected, rel=1e-9), kind
        assert f"x/{kind}" in caplog.text
    assert list(reduced) == sorted(reduced)
    await actors[0].measure.call_one({"mean": [4.0]})
    again = await logger.flush.call_one(2)
    assert again["x/mean"] == 4.0
    assert "x/sum" not in again
    await logger.shutdown.call_one()


# the end


def _children() -> set[int]:
    """Pids of this process' children."""
    mine = str(os.getpid())
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[1] == mine:
            found.add(int(stat.parent.name))
    return found


async def test_shutdown_leaves_no_process(rt: Any) -> None:
    before = _children()
    service = await worker(rt).options(num_replicas=2).as_service()
    actor = await worker(rt).options(colocate="light").as_actor()
    busy = asyncio.create_task(service.wait.route(60))
    await asyncio.sleep(0.2)
    pids = [*await rt.pids(service), *await rt.pids(actor)]
    assert alive(pids) == pids
    started = time.monotonic()
    await rt.shutdown()
    assert time.monotonic() - started < 20
    assert alive(sorted(_children() - before)) == []
    assert alive(pids) == []
    with pytest.raises((ServiceUnavailable, asyncio.CancelledError, RuntimeError)):
        await asyncio.wait_for(busy, 5)
    assert threading.active_count() < 200
