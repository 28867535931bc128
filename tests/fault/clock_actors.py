"""A Coordinator whose wall clock jumps, in a module that worker processes can import."""

from __future__ import annotations

import itertools
import time

from forge_ptq.services.coordinator import Coordinator

DAY_S = 86_400.0


class JumpyCoordinator(Coordinator):
    """The real one; every look at the wall clock finds it a day off, now ahead, now behind."""

    def __init__(self) -> None:
        super().__init__()
        real, jumps = time.time, itertools.cycle((DAY_S, -DAY_S))
        time.time = lambda: real() + next(jumps)
