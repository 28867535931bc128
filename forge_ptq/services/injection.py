"""Faults put into a run on purpose (debug.inject), to see the guard at work."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from forge_ptq.services.replicas import call_all

log = logging.getLogger(__name__)


class Faults:
    """inject: of config.InjectConfig (step, fault, attempts)."""

    def __init__(self, inject: Sequence[Any]) -> None:
        self.inject = list(inject)
        self._hit: Counter[int] = Counter()

    def candidate(self, version: int) -> str | None:
        """The fault of the next quantized candidate of a version."""
        for inject in self.inject:
            if inject.step != version or inject.fault != "corrupt_scales":
                continue
            if self._hit[version] < getattr(inject, "attempts", 1):
                self._hit[version] += 1
                log.warning("injecting %s into a candidate of version %d", inject.fault, version)
                return str(inject.fault)
        return None

    async def after_commit(self, version: int, policy: Any, deadline_s: float) -> None:
        """Damage what serves, if that is asked for. Never raises."""
        if not any(i.step == version and i.fault == "damage_live" for i in self.inject):
            return
        log.warning("damaging the live slot of version %d", version)
        try:
            await call_all(policy, "damage_live", deadline_s=deadline_s)
        except Exception as error:
            log.warning("version %d could not be damaged: %s", version, error)
            log.debug("version %d", version, exc_info=True)
