"""`run`: the client's main coroutine from start to a clean exit."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine
from typing import Any

from forge_ptq.runtime.own.start import leave_monarch

log = logging.getLogger(__name__)

INTERRUPTED = 130


async def _guarded(main: Coroutine[Any, Any, Any], shutdown: Any, kill_all: Any) -> Any:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main)
    interrupts = 0

    def interrupt() -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 1:
            kill_all()
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        return await task
    except asyncio.CancelledError:
        if interrupts == 0:
            raise
        print("interrupted: all processes are being stopped", file=sys.stderr)
        return INTERRUPTED
    finally:
        await shutdown()


def run(main: Coroutine[Any, Any, Any], shutdown: Any, kill_all: Any) -> Any:
    """Runs `main`, then ends all processes, whether it returned, raised, or was interrupted.

    Ctrl-C and SIGTERM cancel `main`, which may clean up in `finally`; the result is then 130 and no
    traceback is printed. A second Ctrl-C kills the processes at once. Monarch cannot be used again
    in this process afterwards.
    """
    try:
        return asyncio.run(_guarded(main, shutdown, kill_all))
    finally:
        leave_monarch()
