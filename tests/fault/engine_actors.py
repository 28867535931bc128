"""A generator whose engine can be made to fail, in a module that worker processes can import."""

from __future__ import annotations

import asyncio
from typing import Any

from forge_ptq.engine.generator import QuantizedGenerator
from forge_ptq.runtime import concurrent_endpoint


class BreakableGenerator(QuantizedGenerator):
    """The real one, and a step that raises when asked for."""

    @concurrent_endpoint
    async def break_engine(self) -> None:
        """The next step raises, as after an error of the device."""

        def step() -> None:
            raise ArithmeticError("device error")

        self._core.step = step  # type: ignore[method-assign]

    @concurrent_endpoint
    async def slow_filling(self, seconds: float) -> None:
        """Each piece of the next staging takes this long, to be killed in the middle of it."""
        fill = self._core.bank.fill

        def slowly(slot: int, plan: Any) -> Any:
            import time

            for _ in fill(slot, plan):
                time.sleep(seconds)
                yield

        self._core.bank.fill = slowly  # type: ignore[method-assign]
        await asyncio.sleep(0)
