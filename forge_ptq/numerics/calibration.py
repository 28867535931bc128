"""Calibration: what one calibration round decided, frozen until the next.

Everything that ``quantize`` needs besides the weights (scheme, static range and smoothing factors
per layer) and what drift is measured against later (the merged statistics behind the ranges).
Stored as flat tensors and a JSON text, see ``to_tensors``; nothing is pickled.

Shape suffixes: C input channels of a site.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from forge_ptq.numerics.plan import SCHEME_NAMES
from forge_ptq.numerics.stats import ActivationStats
from forge_ptq.numerics.stats_table import Layout, pack, unpack

SCHEMA = 2
SHIFT = "shift"
STATS = "stats."


class CalibrationFormatError(ValueError):
    """Stored bytes that are no Calibration, or of another schema."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Result of calibration round ``round`` on ``policy_version``."""

    round: int
    policy_version: int
    layers: Mapping[str, str]
    """Scheme of every linear that may be quantized."""
    absmax: Mapping[str, float]
    """|x| that a static scale maps to 127, per layer, of the smoothed input; fused layers agree."""
    shift: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """log2 of the smoothing factors per smoothed site, int8 [C]."""
    stats: Mapping[str, ActivationStats] = field(default_factory=dict)
    """Merged statistics of the smoothed inputs, per site."""
    tokens: int = 0
    contributors: tuple[str, ...] = ()
    """Replicas whose shares went in."""
    dropped: tuple[str, ...] = ()
    """Shares or replicas left out, with the reason."""
    predicted_rise: float | None = None
    """Perplexity rise the planner measured for these layers; None if the plan was given."""
    alpha: Mapping[str, float] = field(default_factory=dict)
    """Smoothing strength per smoothed site."""
    range_method: str = "absmax"
    """How the ranges were chosen: absmax, percentile, mse or kl."""
    budget: float | None = None
    """Perplexity rise that the plan had to stay within; None if the plan was given."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """The plan as it was configured, JSON only; whoever finds a calibration compares it."""

    def to_tensors(self) -> tuple[dict[str, torch.Tensor], str]:
        """(flat tensors, JSON text). ValueError for a range that is not finite."""
        for name, value in self.absmax.items():
            if not math.isfinite(value):
                raise ValueError(f"{name}: its calibrated range is {value}")
        for name, shift_C in self.shift.items():
            if shift_C.dtype != torch.int8 or shift_C.dim() != 1:
                raise ValueError(f"{name}: factors must be int8 [C], got {shift_C.dtype}")
        layout = Layout.of(self.stats)
        shifts = [shift_C.cpu() for shift_C in self.shift.values()]
        tensors = {SHIFT: torch.cat(shifts) if shifts else torch.empty(0, dtype=torch.int8)}
        if self.stats:
            tensors |= {STATS + name: t for name, t in pack(self.stats, layout).items()}
        text = json.dumps(
            {
                "schema": SCHEMA,
                "round": self.round,
                "policy_version": self.policy_version,
                "layers": dict(self.layers),
                "absmax": dict(self.absmax),
                "shift": {name: len(shift_C) for name, shift_C in self.shift.items()},
                "stats": [list(site) for site in layout.sites],
                "tokens": self.tokens,
                "contributors": list(self.contributors),
                "dropped": list(self.dropped),
                "predicted_rise": _finite_or_none(self.predicted_rise),
                "alpha": dict(self.alpha),
                "range_method": self.range_method,
                "budget": self.budget,
                "asked": dict(self.asked),
            },
            allow_nan=False,
        )
        return tensors, text

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], text: str) -> Calibration:
        """Inverse of ``to_tensors``; CalibrationFormatError for anything else."""
        try:
            record = json.loads(text)
            if record["schema"] != SCHEMA:
                raise CalibrationFormatError(
                    f"calibration of schema {record['schema']}, this code reads {SCHEMA}"
                )
            sizes = record["shift"]
            shifts = tensors[SHIFT].split(list(sizes.values())) if sizes else ()
            layout = Layout(tuple((name, int(channels)) for name, channels in record["stats"]))
            table = {k.removeprefix(STATS): t for k, t in tensors.items() if k.startswith(STATS)}
            return cls(
                round=record["round"],
                policy_version=record["policy_version"],
                layers=_checked_layers(record["layers"]),
                absmax={name: float(value) for name, value in record["absmax"].items()},
                shift=dict(zip(sizes, shifts, strict=True)),
                stats=unpack(table, layout) if layout.sites else {},
                tokens=record["tokens"],
                contributors=tuple(record["contributors"]),
                dropped=tuple(record["dropped"]),
                predicted_rise=record["predicted_rise"],
                alpha=record["alpha"],
                range_method=record["range_method"],
                budget=record["budget"],
                asked=dict(record["asked"]),
            )
        except CalibrationFormatError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise CalibrationFormatError(f"not a stored calibration: {error!r}") from error


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _checked_layers(layers: Any) -> dict[str, str]:
    for name, scheme in layers.items():
        if scheme not in SCHEME_NAMES:
            raise CalibrationFormatError(f"{name}: unknown scheme {scheme!r}")
    return dict(layers)
