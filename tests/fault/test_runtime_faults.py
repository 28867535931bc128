"""Our own runtime under faults that the contract tests leave out: hangs, poison, lost metrics."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from forge_ptq.runtime import ActorDied, RequestTimeout, endpoint, own
from forge_ptq.runtime.own import metric_logger
from forge_ptq.runtime.own.backends import WandbBackend
from forge_ptq.runtime.own.death import ProcessId

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


@pytest_asyncio.fixture(loop_scope="module")
async def victim() -> AsyncIterator[Any]:
    """An actor class; what was spawned of it is ended afterwards."""

    class Victim(own.ForgeActor):
        @endpoint
        async def pid(self) -> int:
            return os.getpid()

        @endpoint
        async def die(self) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        @endpoint
        async def leave(self) -> None:
            os._exit(3)

        @endpoint
        async def block(self, seconds: float) -> None:
            time.sleep(seconds)  # noqa: ASYNC251  (hangs on purpose)

        @endpoint
        async def count(self, amount: int) -> None:
            own.record_metric("n", amount, own.Reduce.SUM)

    yield Victim
    await own.shutdown()


async def test_poison_ends_after_max_attempts(victim: Any) -> None:
    service = await victim.options(num_replicas=2, max_attempts=2).as_service()
    before = await own.pids(service)
    with pytest.raises(ActorDied, match=r"Victim\.die: 2 replicas died.*max_attempts = 2"):
        await service.die.route()
    after = {await service.pid.route() for _ in range(4)}
    assert not after & set(before)


async def test_exit_is_a_death_like_any_other(victim: Any) -> None:
    actor = await victim.as_actor()
    started = time.monotonic()
    with pytest.raises(ActorDied, match=str((await own.pids(actor))[0])):
        await actor.leave.call_one()
    assert time.monotonic() - started < 1.5


async def test_replica_that_hangs_is_restarted_if_so_configured(victim: Any) -> None:
    options = {"request_timeout_s": 1.0, "restart_on_timeout": True}
    service = await victim.options(**options).as_service()
    (pid,) = await own.pids(service)
    with pytest.raises(RequestTimeout, match=r"Victim\.block on replica 0"):
        await service.block.route(60)
    await asyncio.sleep(0.5)
    assert not ProcessId.of(pid).alive()
    service.service.cfg.request_timeout_s = 30.0  # the respawn may take more than a second
    assert await service.pid.route() != pid


async def test_stopped_process_does_not_hold_up_shutdown(victim: Any) -> None:
    actor = await victim.as_actor()
    (pid,) = await own.pids(actor)
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    await own.shutdown()
    assert time.monotonic() - started < 10
    assert not ProcessId.of(pid).alive()


async def test_death_of_one_rank_is_the_death_of_the_actor(victim: Any) -> None:
    actor = await victim.options(procs=2).as_actor()
    pids = await own.pids(actor)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(ActorDied, match=str(pids[1])):
        await actor.pid.call()
    await victim.shutdown(actor)
    assert not ProcessId.of(pids[0]).alive()


async def test_group_of_a_dead_process_starts_afresh(victim: Any) -> None:
    light = victim.options(colocate="light")
    first = await light.as_actor()
    (pid,) = await own.pids(first)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDied):
        await first.pid.call_one()
    second = await light.as_actor()
    assert await second.pid.call_one() != pid
    await light.shutdown(first)
    assert await second.pid.call_one() == (await own.pids(second))[0]


async def test_flush_does_without_a_dead_process_and_waits_for_no_stopped_one(
    victim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_logger, "COLLECT_TIMEOUT_S", 1.0)
    healthy, stopped, dead = [await victim.as_actor() for _ in range(3)]
    logger = await own.get_or_create_metric_logger()
    await logger.flush.call_one(0)  # what other tests have recorded in this process
    for amount, actor in ((1, healthy), (10, stopped), (100, dead)):
        await actor.count.call_one(amount)
    stopped_pid, dead_pid = (await own.pids(stopped))[0], (await own.pids(dead))[0]
    os.kill(stopped_pid, signal.SIGSTOP)
    os.kill(dead_pid, signal.SIGKILL)
    started = time.monotonic()
    assert await logger.flush.call_one(1) == {"n": 1.0}
    assert time.monotonic() - started < 3
    os.kill(stopped_pid, signal.SIGCONT)
    await asyncio.sleep(0.3)
    assert (await logger.flush.call_one(2))["n"] == 10.0  # late, but neither lost nor doubled
    assert "n" not in await logger.flush.call_one(3)


async def test_offline_wandb_run_in_the_light_process(victim: Any, tmp_path: Path) -> None:
    actor = await victim.as_actor()
    logger = await own.get_or_create_metric_logger()
    wandb = {
        "project": "p",
        "group": "g",
        "name": "n",
        "id": "abc",
        "mode": "offline",
        "dir": str(tmp_path),
        "config": {"seed": 1},
        "logging_mode": "per_rank_reduce",
    }
    await logger.init_backends.call_one({"wandb": wandb})
    await actor.count.call_one(5)
    assert (await logger.flush.call_one(3))["n"] == 5.0
    await logger.shutdown.call_one()
    (run,) = (tmp_path / "wandb").glob("offline-run-*-abc")
    written = (run / "run-abc.wandb").read_bytes()
    for part in (b"Victim_r0/n", b"_step", b"seed"):
        assert part in written


async def test_loss_of_the_wandb_process_does_not_stop_the_run(victim: Any, tmp_path: Path) -> None:
    logger = await own.get_or_create_metric_logger()
    await logger.init_backends.call_one(
        {"wandb": {"mode": "offline", "dir": str(tmp_path)}, "console": {}}
    )
    _, backend = logger._backends["wandb"]
    assert isinstance(backend, WandbBackend)
    writer = backend.writer
    os.kill((await own.pids(writer))[0], signal.SIGKILL)
    own.record_metric("n", 2.0)
    assert (await logger.flush.call_one(1))["n"] == 2.0
    assert list(logger._backends) == ["console"]
