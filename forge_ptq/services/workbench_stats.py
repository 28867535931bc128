"""Statistics between a replica's ranks: whose part is what, and the parts as one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from forge_ptq.numerics.calibration import Calibration
from forge_ptq.numerics.stats import ActivationStats
from forge_ptq.numerics.stats_table import channel_slice


def tokens_of(stats: Mapping[str, ActivationStats]) -> int:
    """Positions that a share saw (all sites see all of them)."""
    return max((stat.tokens for stat in stats.values()), default=0)


def is_static(calibration: Calibration, members: Sequence[str]) -> bool:
    return any(calibration.layers.get(member) == "int8_static" for member in members)


def part_of(stats: ActivationStats, rank: int, size: int) -> ActivationStats:
    """What one of several ranks has to add to; partial sums go to rank 0."""
    if size == 1:
        return stats
    channels = channel_slice(stats.channels, rank, size)
    first = rank == 0
    return ActivationStats(
        tokens=stats.tokens,
        absmax_C=stats.absmax_C[channels],
        sum_sq_C=stats.sum_sq_C[channels],
        sum=stats.sum if first else 0.0,
        histogram_B=stats.histogram_B if first else torch.zeros_like(stats.histogram_B),
        non_finite=stats.non_finite if first else 0,
    )


def joined(tables: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The ranks' tables as one that ``stats_table.unpack`` takes."""
    if len(tables) == 1:
        return tables[0]
    return {
        name: torch.stack([table[name] for table in tables])
        if name in ("histogram", "scalars")
        else torch.cat([table[name] for table in tables], dim=1)
        for name in tables[0]
    }
