"""The runtime's contract: actors, metrics, shutting down.

Runs against our own runtime always, and against real torchforge where it can be imported.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_ptq.runtime import ActorDied, ServiceUnavailable
from tests.integration.runtime_support import alive, children, eventually, worker

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


async def test_actor_calls_and_arguments(rt: Any) -> None:
    actor = await worker(rt).options(procs=2).as_actor(5)
    ranks = [value for _, value in (await actor.rank.call()).items()]
    assert ranks == [("0", "2"), ("1", "2")]
    added = await actor.add.call(2, times=3)
    assert [value for _, value in added.items()] == [11, 11]
    assert [value for _, value in (await actor.is_ready.call()).items()] == [True, True]
    assert len(set(await rt.pids(actor))) == 2


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
    before = children()
    with pytest.raises(OSError, match="no such checkpoint"):
        await worker(rt).as_actor(fail_setup_if=str(tmp_path))
    assert alive(sorted(children() - before)) == []


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

    async def ended() -> bool:
        return not alive(two.processes.pids)

    await eventually(ended)


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


async def test_shutdown_leaves_no_process(rt: Any) -> None:
    before = children()
    service = await worker(rt).options(num_replicas=2).as_service()
    actor = await worker(rt).options(colocate="light").as_actor()
    busy = asyncio.create_task(service.wait.route(60))
    await asyncio.sleep(0.2)
    pids = [*await rt.pids(service), *await rt.pids(actor)]
    assert alive(pids) == pids
    started = time.monotonic()
    await rt.shutdown()
    assert time.monotonic() - started < 20
    assert alive(sorted(children() - before)) == []
    assert alive(pids) == []
    with pytest.raises((ServiceUnavailable, asyncio.CancelledError, RuntimeError)):
        await asyncio.wait_for(busy, 5)
