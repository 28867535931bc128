"""What publishing and watching work with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forge_ptq.services.candidate import Publisher
from forge_ptq.services.injection import Faults
from forge_ptq.services.ladder import Ladder
from forge_ptq.services.sampler import RolloutSampler
from forge_ptq.services.schedule import Schedule
from forge_ptq.services.serving import Serving


@dataclass(frozen=True)
class Parts:
    """Of one publisher. cfg: config.PTQConfig. fleet: fleet.QuantizerFleet."""

    cfg: Any
    fleet: Any
    sampler: RolloutSampler
    schedule: Schedule
    publisher: Publisher
    serving: Serving
    ladder: Ladder
    faults: Faults
