"""However a client ends, its processes end with it: return, error, Ctrl-C, kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_ptq.runtime.own.death import ProcessId

pytestmark = pytest.mark.timeout(90)

SCRIPT = """
import asyncio, os, sys
from forge_ptq import runtime
from forge_ptq.runtime import ForgeActor, endpoint

class Sleeper(ForgeActor):
    @endpoint
    async def sleep(self, seconds):
        await asyncio.sleep(seconds)

async def main():
    service = await Sleeper.options(num_replicas=2).as_service()
    actor = await Sleeper.options(colocate="light").as_actor()
    pids = [*await runtime.pids(service), *await runtime.pids(actor)]
    print("pids", *pids, flush=True)
    try:
        if "wait" in sys.argv:
            await asyncio.gather(service.sleep.route(600), actor.sleep.call_one(600))
        if "raise" in sys.argv:
            raise ValueError("the app's own error")
        return 0
    finally:
        print("cleaned", file=sys.stderr, flush=True)

if __name__ == "__main__":
    sys.exit(runtime.run(main()))
"""


class Client:
    """The script in a process group of its own, as a terminal would start it."""

    def __init__(self, folder: Path, mode: str) -> None:
        script = folder / "client.py"
        script.write_text(SCRIPT)
        self.process = subprocess.Popen(
            [sys.executable, str(script), mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "FORGE_PTQ_LOG_DIR": str(folder)},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().split()
        if line[:1] != ["pids"]:
            raise RuntimeError(f"the client did not start: {self.process.communicate()}")
        self.children = [ProcessId.of(int(pid)) for pid in line[1:]]

    def end(self) -> tuple[int, str]:
        """Exit code and stderr."""
        _, err = self.process.communicate(timeout=40)
        return self.process.returncode, err

    def orphans(self, grace_s: float) -> list[int]:
        """Children that outlive the client by more than `grace_s` seconds; ended here."""
        limit = time.monotonic() + grace_s
        while any(child.alive() for child in self.children) and time.monotonic() < limit:
            time.sleep(0.05)
        left = [child.pid for child in self.children if child.alive()]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return left


def test_return(tmp_path: Path) -> None:
    client = Client(tmp_path, "return")
    code, err = client.end()
    assert client.orphans(0.0) == []
    assert code == 0
    assert err.count("cleaned\n") == 1
    assert "Traceback" not in err


def test_error(tmp_path: Path) -> None:
    client = Client(tmp_path, "raise")
    code, err = client.end()
    assert client.orphans(0.0) == []
    assert code == 1
    assert err.rstrip().endswith("ValueError: the app's own error")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt(tmp_path: Path, number: signal.Signals) -> None:
    client = Client(tmp_path, "wait")
    assert len(client.children) == 3
    assert all(child.alive() for child in client.children)
    # Ctrl-C goes to every process of the group: the children must leave it to the client.
    os.killpg(client.process.pid, signal.SIGINT) if number is signal.SIGINT else os.kill(
        client.process.pid, number
    )
    code, err = client.end()
    assert client.orphans(0.0) == []
    assert code == 130
    assert err.count("cleaned\n") == 1
    assert "Traceback" not in err
    assert "interrupted" in err


def test_client_is_killed(tmp_path: Path) -> None:
    client = Client(tmp_path, "wait")
    client.process.kill()
    client.end()
    assert client.orphans(3.0) == []
