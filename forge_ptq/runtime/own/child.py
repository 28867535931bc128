"""First code of every spawned process. Run by path, standard library only, before Monarch.

It puts in place what must precede every import: working directory on sys.path (as `python -m`
would), output to the mesh's log file, Ctrl-C ignored (the terminal sends it to the whole process
group, but only the client may decide the order of shutting down), and a watch on the parent, so
that no process outlives a killed client.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time

LOG_FILE = "FORGE_PTQ_CHILD_LOG"
PRELOAD = "FORGE_PTQ_CHILD_PRELOAD"
"""Path of a Python file to run first, as module __preload__ (see shims.py)."""
_PARENT_POLL_S = 0.5


def _redirect_output(path: str) -> None:
    """Sends fds 1 and 2 to the end of `path`; line buffered, shared by all ranks of a mesh."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _die_with_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _leave() -> None:
    """Ends the process without finalizing the interpreter, which takes seconds with torch loaded.

    Registered first, so that it runs after all exit handlers of libraries.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def prepare() -> None:
    """Does everything that the module's docstring lists."""
    atexit.register(_leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path.insert(0, os.getcwd())
    log_file = os.environ.pop(LOG_FILE, "")
    if log_file:
        _redirect_output(log_file)
    threading.Thread(target=_die_with_parent, args=(os.getppid(),), daemon=True).start()


if __name__ == "__main__":
    import runpy

    prepare()
    preload = os.environ.pop(PRELOAD, "")
    if preload:
        runpy.run_path(preload, run_name="__preload__")
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)
