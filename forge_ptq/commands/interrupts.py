"""Ctrl-C and SIGTERM for commands: whatever runs is unwound, so that it can clean up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal came; not an Exception, so that nothing takes it for a failure to report."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number

    @property
    def exit_code(self) -> int:
        """As shells count them: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.number


@contextmanager
def interruptible() -> Iterator[None]:
    """The first SIGINT or SIGTERM raises Interrupted within; a second one kills at once.

    A library may turn the exception into one of its own or lose it: Interrupted leaves this context
    whatever became of it. Outside the main thread, where Python takes no signals, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        came.append(number)
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        raise Interrupted(number)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    except BaseException as error:
        if came:
            raise Interrupted(came[0]) from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise Interrupted(came[0])
