"""How a generator's process ends: in order, or because its engine died."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

log = logging.getLogger(__name__)

GONE_WITHIN_S = 10.0
"""A process whose engine has died is gone by then."""


def leave() -> None:
    """End the process now: finalizing torch and vLLM takes seconds, and nothing is left to save.

    For ``atexit``; registered last, it runs before vLLM's own exit handlers, which are the slow
    ones.
    """
    _exit(0)


def die(cause: BaseException, why: str = "the engine died, so this process ends") -> None:
    """End the process with status 1, so that the service respawns it."""
    log.critical(why, exc_info=cause)
    _exit(1)


async def until_gone() -> None:
    """Wait for ``die``. A request that answers with its engine's death would fail at its caller;
    one whose process dies under it is tried again on the process that comes after it.
    """
    await asyncio.sleep(GONE_WITHIN_S)


def _exit(status: int) -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
