"""Stands in for pycosat where it could not be compiled: it can be imported, but not used."""

from typing import NoReturn


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(
        "pycosat is needed for this reasoning-gym task, and no C compiler was there to build it. "
        "Install gcc and python3.11-dev, remove .venv and run make again."
    )
