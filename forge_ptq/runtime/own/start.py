"""Starts Monarch's client in this process with our settings."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import monarch.actor

log = logging.getLogger(__name__)

# Monarch reads these when its client starts. Poll supervision twice a second, not every ten; and
# give processes time to start on a busy machine (its defaults are 30 s).
_DEFAULTS = {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "500ms",
    "HYPERACTOR_HOST_SPAWN_READY_TIMEOUT": "120s",
    "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE": "120s",
    "HYPERACTOR_MESH_ACTOR_SPAWN_MAX_IDLE": "120s",
}
HOST_TIMEOUT_S = 5.0
LEAVE_TIMEOUT_S = 12.0
_GREETING = b"Monarch internal logs are being written to"


def _log_fault(failure: Any) -> None:
    """Monarch's hook for failures that no actor handled; its default would end the client.

    The runtime learns of deaths from the calls and from its own watch, so a line is enough.
    """
    log.debug("monarch reports a failed mesh: %s", str(failure).strip().partition("\n")[0])


@contextmanager
def _stderr_without(greeting: bytes) -> Iterator[None]:
    """Holds back what is written to fd 2 meanwhile, and then writes all of it but `greeting`."""
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            held.seek(0)
            for line in held:
                if not line.startswith(greeting):
                    os.write(2, line)


def start_monarch() -> None:
    """Starts the client if it does not run yet; deaths of processes will not end it."""
    for key, value in _DEFAULTS.items():
        os.environ.setdefault(key, value)
    monarch.actor.unhandled_fault_hook = _log_fault
    monarch.actor.config.prefix_python_logs_with_actor = False  # in the client: ours only
    with _stderr_without(_GREETING):
        monarch.actor.context()
    atexit.unregister(leave_monarch)
    atexit.register(leave_monarch)  # runs before Monarch's own, which then has nothing left to do


def leave_monarch() -> None:
    """Shuts Monarch's client down; it cannot be used again in this process. May be repeated.

    A client that lost processes may not find its end (their meshes never answer). The processes
    are gone by then, so that the interpreter may go, too.
    """
    try:
        monarch.actor.shutdown_context(host_timeout=HOST_TIMEOUT_S).get(LEAVE_TIMEOUT_S)
    except TimeoutError:
        log.warning("monarch's client did not shut down within %g s", LEAVE_TIMEOUT_S)
