"""What the contract tests of the runtime share: implementations, an actor class, helpers.

Actors are defined inside functions: spawned processes get such classes by value, and so need not
be able to import the tests.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from forge_ptq.runtime import concurrent_endpoint, endpoint, shims
from forge_ptq.runtime.own.death import ProcessId


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


def children() -> set[int]:
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
