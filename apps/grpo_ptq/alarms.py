"""What a training step warns of."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from forge_ptq.config import RunConfig
from forge_ptq.mismatch import alarms
from forge_ptq.runtime import Reduce, record_metric

log = logging.getLogger(__name__)


def sound_alarms(cfg: RunConfig, step: int, metrics: Mapping[str, float]) -> list[str]:
    """Logs and counts what is over its limit in the metrics of training step `step`; returns it in
    words. Recorded even where it is 0, so that the curve has no gaps."""
    raised = [str(alarm) for alarm in alarms(metrics, cfg.ptq.guard.probation, cfg.alarms)]
    for text in raised:
        log.warning("step %d: %s", step, text)
    record_metric("rl_trainer/alarms", len(raised), Reduce.SUM)
    return raised
