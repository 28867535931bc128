"""Recognises that an allocation failed, whoever tried it.

PyTorch, oneDNN, CUDA and Python each say it in their own type and words, and most as a plain
RuntimeError. A kernel that overcommits does not say it at all: it kills a process later, which the
service then respawns.
"""

from __future__ import annotations

import traceback

_SIGNS = (
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "out_of_memory",
    "bad_alloc",
    "could not create a memory object",  # oneDNN, where the buffer for packed weights is refused
)


def out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory could not be had."""
    if isinstance(error, MemoryError):
        return True
    if type(error).__name__ == "OutOfMemoryError":  # torch's, wherever this torch keeps it
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(sign in text for sign in _SIGNS)


def let_go(error: BaseException) -> None:
    """Free what the frames of a failed allocation hold, which an error kept by a caller would."""
    traceback.clear_frames(error.__traceback__)
