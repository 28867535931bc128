"""Routing, slots, GPUs, configuration, launchers, shims: the runtime's parts without processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from forge_ptq import runtime
from forge_ptq.runtime import shims
from forge_ptq.runtime.own.backends import make_backend
from forge_ptq.runtime.own.death import DeathWatch, ProcessId
from forge_ptq.runtime.own.gpus import GpuPool, visible_gpus
from forge_ptq.runtime.own.launcher import HostLauncher
from forge_ptq.runtime.own.replica import Slots
from forge_ptq.runtime.own.router import LeastLoadedRouter, RoundRobinRouter, SessionRouter
from forge_ptq.runtime.own.types import LauncherConfig, ProcessConfig, ServiceConfig


@dataclass
class Fake:
    """A replica for the routers."""

    idx: int
    load: int = 0


def test_round_robin_keeps_its_turn_when_replicas_come_and_go() -> None:
    router, a, b, c = RoundRobinRouter(), Fake(0), Fake(1), Fake(2)
    assert [router.pick([a, b, c]).idx for _ in range(4)] == [0, 1, 2, 0]
    assert router.pick([a, c]).idx == 2
    assert router.pick([a, b, c]).idx == 0


def test_least_loaded() -> None:
    assert LeastLoadedRouter().pick([Fake(0, 3), Fake(1, 1), Fake(2, 1)]).idx == 1


def test_sessions_are_bound_at_their_first_request() -> None:
    router, a, b = SessionRouter(), Fake(0, 5), Fake(1, 0)
    router.open("s")
    assert router.pick([a, b], "s") is b
    b.load = 9
    assert router.pick([a, b], "s") is b
    assert router.pick([a], "s") is a
    assert router.pick([a, b], "s") is a
    router.close("s")
    with pytest.raises(KeyError, match="'s' is not open"):
        router.pick([a], "s")


async def test_slots_admit_in_order_and_send_waiters_away() -> None:
    slots = Slots(1)
    await slots.acquire(1)
    order: list[int] = []

    async def use(number: int) -> None:
        await slots.acquire(5)
        order.append(number)
        slots.release()

    users = [asyncio.create_task(use(i)) for i in range(3)]
    await asyncio.sleep(0)
    assert (slots.active, slots.waiting) == (1, 3)
    slots.release()
    await asyncio.gather(*users)
    assert order == [0, 1, 2]
    assert (slots.active, slots.waiting) == (0, 0)

    await slots.acquire(1)
    with pytest.raises(TimeoutError):
        await slots.acquire(0.01)
    waiter = asyncio.create_task(slots.acquire(5))
    await asyncio.sleep(0)
    slots.close(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        await waiter
    assert slots.active == 1


async def test_a_slot_given_to_a_cancelled_waiter_is_not_lost() -> None:
    slots = Slots(1)
    await slots.acquire(1)
    waiter = asyncio.create_task(slots.acquire(5))
    await asyncio.sleep(0)
    slots.release()  # now the waiter's, which has not run yet
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await slots.acquire(0.1)


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0, 5")
    pool = GpuPool(visible_gpus())
    assert pool.take(2, "trainer") == [0, 2]
    with pytest.raises(RuntimeError, match="policy asks for 2 GPUs, 1 are free"):
        pool.take(2, "policy")
    pool.give_back([0])
    assert pool.free == [0, 5]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-abc")
    with pytest.raises(ValueError, match="GPU-abc"):
        visible_gpus()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ProcessConfig(procs=0), "procs = 0: expected int >= 1"),
        (lambda: ProcessConfig(hosts=0), "hosts = 0"),
        (lambda: ProcessConfig(env={"A": 1}), "env"),  # type: ignore[dict-item]
        (lambda: ProcessConfig(colocate="x", procs=2), "colocate = 'x'"),
        (lambda: ServiceConfig(num_replicas=0), "num_replicas = 0"),
        (lambda: ServiceConfig(routing="random"), "routing = 'random'.*least_loaded"),
        (lambda: ServiceConfig(request_timeout_s=0), "request_timeout_s = 0"),
        (lambda: ServiceConfig(max_queued_requests=0), "max_queued_requests = 0"),
        (lambda: LauncherConfig(launcher="k8s"), "launcher = 'k8s': expected local | slurm"),
        (lambda: HostLauncher(LauncherConfig(launcher="mast")), "mast"),
        (lambda: HostLauncher(LauncherConfig(scheduler_args={"queue": 1})), "queue.*partition"),
        (lambda: make_backend("tensorboard", {}), "metric_logging.tensorboard"),
        (lambda: make_backend("console", {"logging_mode": "all"}), "logging_mode = 'all'"),
        (lambda: make_backend("console", {"colour": 1}), "colour"),
    ],
)
def test_wrong_configuration_names_key_and_value(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        make()


async def test_local_launcher_has_no_remote_hosts() -> None:
    with pytest.raises(RuntimeError, match=r"'trainer' asks for hosts=2.*slurm"):
        await HostLauncher(LauncherConfig()).allocate("trainer", 2)


def test_replicas_keep_the_placement_of_their_service() -> None:
    cfg = ServiceConfig(procs=2, with_gpus=True, env={"A": "1"}, spawn_timeout_s=5)
    process = cfg.to_process_config()
    assert (process.procs, process.with_gpus, process.env) == (2, True, {"A": "1"})
    assert process.spawn_timeout_s == 5


def test_death_is_noticed_and_a_reused_pid_is_not_mistaken() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessId.of(child.pid)
    assert identity.alive()
    assert not ProcessId(child.pid, identity.start_ticks + 1).alive()
    died = threading.Event()
    watch = DeathWatch()
    watch.subscribe((identity,), lambda pid: died.set() if pid == child.pid else None)
    ignored: list[int] = []
    watch.subscribe((identity,), ignored.append)
    watch.unsubscribe((identity,), ignored.append)
    child.kill()
    assert died.wait(2.0)  # a zombie counts as dead: nobody has waited for it yet
    child.wait()
    assert not identity.alive()
    assert ignored == []


def test_choice_of_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_PTQ_RUNTIME", "ours")
    with pytest.raises(ValueError, match="FORGE_PTQ_RUNTIME = 'ours': expected own or torchforge"):
        runtime._torchforge()
    monkeypatch.setenv("FORGE_PTQ_RUNTIME", "own")
    assert runtime._torchforge() is None


def test_shims_supply_only_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "monarch._src.actor.allocator"
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert name in shims.install()
    assert name not in shims.install()
    allocator = sys.modules[name]
    with pytest.raises(RuntimeError, match=r"RemoteAllocator.*Monarch 0.7 dropped"):
        allocator.RemoteAllocator()
    monkeypatch.setitem(shims.MODULES, "json", {"dumps": None})
    assert "json" not in shims.install()


def test_importing_the_runtime_is_light() -> None:
    code = (
        "import sys, forge_ptq.runtime; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    )
    env = {**os.environ, "FORGE_PTQ_RUNTIME": "own"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "[]", result.stderr
