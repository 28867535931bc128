"""How a generator's process ends: in order, or because its engine died."""

from __future__ import annotations

import logging
import os
import sys
import time

log = logging.getLogger(__name__)

LAST_WORDS_S = 1.0


def leave() -> None:
    """End the process now: finalizing torch and vLLM takes seconds, and nothing is left to save.

    For ``atexit``; registered last, it runs before vLLM's own exit handlers, which are the slow
    ones.
    """
    _exit(0)


def die(cause: BaseException) -> None:
    """End the process of a dead engine with status 1, so that the service respawns it.

    Waits LAST_WORDS_S first, in which the event loop answers the requests that have failed.
    """
    log.critical("the engine died, so this process ends", exc_info=cause)
    time.sleep(LAST_WORDS_S)
    _exit(1)


def _exit(status: int) -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
