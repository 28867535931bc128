"""A verdict's numbers as metrics; observe/names.py says what each means."""

from __future__ import annotations

from forge_ptq.runtime import Reduce, record_metric
from forge_ptq.services.verdict import Verdict


def record(verdict: Verdict) -> None:
    """Record what was measured; what was not, or is not a number, leaves no trace."""
    share = verdict.flop_share or {}
    values: list[tuple[str, float | None, Reduce]] = [
        ("publish/accepted", float(verdict.outcome == "accepted"), Reduce.SUM),
        ("publish/fell_back", float(verdict.outcome == "fell_back"), Reduce.SUM),
        ("publish/kept", float(verdict.outcome == "kept"), Reduce.SUM),
        ("publish/refused", float(verdict.refused), Reduce.SUM),
        ("publish/perplexity_rise", verdict.perplexity_rise, Reduce.MEAN),
        ("publish/nll_perplexity_rise", verdict.nll_perplexity_rise, Reduce.MEAN),
        ("publish/kl", verdict.kl, Reduce.MEAN),
        ("publish/worst_sequence_rise", verdict.worst_sequence_rise, Reduce.MAX),
        ("publish/probe_tokens", float(verdict.probe_tokens), Reduce.MEAN),
        ("publish/static_share", share.get("int8_static"), Reduce.MEAN),
        ("publish/dynamic_share", share.get("int8_dynamic"), Reduce.MEAN),
        ("publish/bf16_share", share.get("bf16"), Reduce.MEAN),
        ("publish/quantize_s", verdict.quantize_s, Reduce.MEAN),
        ("publish/stage_s", verdict.stage_s, Reduce.MEAN),
        ("publish/probe_s", verdict.probe_s, Reduce.MEAN),
        ("publish/pause_s", verdict.pause_s, Reduce.MAX),
        ("publish/wall_s", verdict.wall_s, Reduce.MEAN),
        ("publish/bytes", verdict.bytes, Reduce.MEAN),
        ("calibration/made", float(verdict.calibrated), Reduce.SUM),
        ("calibration/failed", float(verdict.calibration_failed), Reduce.SUM),
        ("calibration/seconds", verdict.calibrate_s, Reduce.MEAN),
        ("drift/clipped_fraction", verdict.drift_clipped_fraction, Reduce.MAX),
        ("drift/js_distance", verdict.drift_js_distance, Reduce.MAX),
        ("drift/absmax_ratio", verdict.drift_absmax_ratio, Reduce.MAX),
        ("drift/exceeded", float(verdict.drift_exceeded is not None), Reduce.SUM),
    ]
    if verdict.calibrated:
        values += [
            ("calibration/tokens", float(verdict.calibration_tokens), Reduce.MEAN),
            ("calibration/contributors", float(len(verdict.contributors)), Reduce.MEAN),
            ("calibration/dropped", float(len(verdict.dropped)), Reduce.SUM),
            ("calibration/predicted_rise", verdict.predicted_rise, Reduce.MEAN),
        ]
    for name, value, reduction in values:
        if value is not None and value == value:
            record_metric(f"ptq/{name}", value, reduction)
