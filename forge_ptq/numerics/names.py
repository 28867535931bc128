"""Names that configuration and command line offer; free of torch, for those that load fast."""

from __future__ import annotations

from typing import Literal, get_args

RangeMethod = Literal["absmax", "percentile", "mse", "kl"]
"""How a static range is chosen, see ``numerics.ranges``."""

RANGE_METHODS: tuple[str, ...] = get_args(RangeMethod)
