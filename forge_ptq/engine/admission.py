"""Which arm a new request goes to: the live slot, or its full-precision companion.

    off     always live
    ab      a fraction of the prompts to the companion, drawn by a hash of the prompt and a counter
    load    the companion while few sequences are unfinished, live from many on, with hysteresis:

            companion --- unfinished >= int8_above ---> live
            companion <-- unfinished <= bf16_below ---- live      in between: as it was

One call of ``generate`` is one prompt, and all its samples go to one arm: a reward's baseline is
the mean of its group, so a group must be of one arm for arms to be compared. The lot of ``ab`` has
no state beyond the counter: the same calls in the same order give the same arms. Nothing here knows
an engine; whether there is a companion the caller says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["off", "ab", "load"]
Arm = Literal["live", "companion"]

MODES = ("off", "ab", "load")
_KEYS = {"off": (), "ab": ("fraction",), "load": ("bf16_below", "int8_above")}


@dataclass(frozen=True)
class Choice:
    """Where a prompt goes. ``drawn``: by lot between two arms that were both open, so that rewards
    of such prompts, and only of such, may be compared."""

    arm: Arm
    drawn: bool = False


LIVE = Choice("live")


class Admission:
    """Chooses the arm of each prompt. ``choose`` is called once for each ``generate``, in order.

    Args:
        mode: off, ab or load.
        fraction: of the prompts that ``ab`` sends to the companion, within (0, 1).
        bf16_below, int8_above: unfinished sequences, before the new ones, at or under (over) which
            ``load`` chooses the companion (live).
    """

    def __init__(
        self,
        mode: Mode = "off",
        fraction: float = 0.5,
        bf16_below: int = 4,
        int8_above: int = 16,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"admission.mode is {mode!r}, expected one of {', '.join(MODES)}")
        if not _number(fraction) or not 0 < fraction < 1:
            raise ValueError(f"admission.fraction is {fraction!r}, expected a number within (0, 1)")
        for key, value in (("bf16_below", bf16_below), ("int8_above", int8_above)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"admission.{key} is {value!r}, expected an integer >= 0")
        if bf16_below >= int8_above:
            raise ValueError(
                f"admission.bf16_below is {bf16_below}, expected less than int8_above={int8_above}"
            )
        self.mode = mode
        self.fraction = fraction
        self.bf16_below = bf16_below
        self.int8_above = int8_above
        self._prompts = 0
        self._full_precision = True  # an engine that starts has no load

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> Admission:
        """From ``{"mode": ..., keys of that mode}``; None is off. ValueError names a wrong key."""
        config = dict(config or {})
        mode = config.pop("mode", "off")
        for key in config:
            if key not in _KEYS.get(mode, ()):
                raise ValueError(f"admission.{key}: mode {mode!r} has no such key")
        return cls(mode, **config)

    def choose(self, prompt_ids: Sequence[int], unfinished: int, companion: bool) -> Choice:
        """The arm of one prompt.

        unfinished: sequences in the engine in both arms, probes aside. companion: whether one
        takes requests now; without it everything goes live, and the load is watched all the same.
        """
        number, self._prompts = self._prompts, self._prompts + 1
        if unfinished >= self.int8_above:
            self._full_precision = False
        elif unfinished <= self.bf16_below:
            self._full_precision = True
        if not companion or self.mode == "off":
            return LIVE
        if self.mode == "load":
            return Choice("companion" if self._full_precision else "live")
        return Choice("companion" if _lot(prompt_ids, number) < self.fraction else "live", True)


def _lot(prompt_ids: Sequence[int], number: int) -> float:
    """Uniform in [0, 1), from the prompt and the number of the call."""
    text = f"{number}:{','.join(map(str, prompt_ids))}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
