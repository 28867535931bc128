"""A store that is missing, hung or dead: StoreError within the deadline, never a hang."""

import asyncio
import os
import signal
import time

import psutil
import pytest
import pytest_asyncio
import torch

from forge_ptq import runtime, store, store_io
from forge_ptq.store import StoreError

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def running_runtime():
    await runtime.init_provisioner()
    yield
    await store.shutdown()
    await runtime.shutdown()


def store_pids(before: set[int]) -> list[int]:
    children = {process.pid for process in psutil.Process().children(recursive=True)}
    return sorted(children - before)


async def fresh_store(volumes: int = 1) -> list[int]:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    await store.initialize(volumes)
    found = store_pids(before)
    assert len(found) == volumes
    return found


def running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"


async def test_without_initialize_the_error_says_so():
    with pytest.raises(StoreError, match=r"store\.initialize"):
        await store.get_weights(1)


async def test_several_volumes_and_shutdown_ends_their_processes():
    found = await fresh_store(2)
    await store.put_weights(1, {"a": torch.ones(3), "b": torch.zeros(2)})
    assert torch.equal((await store.get_weights(1))["a"], torch.ones(3))
    await store.shutdown()
    for _ in range(200):
        if not any(running(pid) for pid in found):
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail(f"store processes {found} survive shutdown")


async def test_hung_then_killed_volume(monkeypatch):
    (pid,) = await fresh_store()
    assert await store.weight_versions() == []
    await store.put_weights(1, {"a": torch.ones(3)})

    monkeypatch.setattr(store_io, "BASE_TIMEOUT_S", 1.0)
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(StoreError, match=r"get policy_ver_0000000001.*within 1 s"):
        await store.get_weights(1)
    with pytest.raises(StoreError, match=r"put policy_ver_0000000002\.a: .*within 1 s"):
        await store.put_weights(2, {"a": torch.ones(3)})
    assert time.monotonic() - start < 6
    os.kill(pid, signal.SIGCONT)
    monkeypatch.setattr(store_io, "BASE_TIMEOUT_S", 15.0)
    assert torch.equal((await store.get_weights(1))["a"], torch.ones(3))
    assert await store.weight_versions() == [1]

    os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(StoreError, match="policy_ver_0000000001"):
        await store.get_weights(1)
    with pytest.raises(StoreError, match="policy_ver_0000000003"):
        await store.put_weights(3, {"a": torch.ones(3)})
    assert time.monotonic() - start < 35
    await store.shutdown()
    await fresh_store()
    await store.put_weights(2, {"a": torch.ones(3)})
    assert await store.weight_versions() == [2]
