"""A generator whose engine can be made to fail, in a module that worker processes can import."""

from __future__ import annotations

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
