"""A verdict's numbers as metrics; observe/names.py says what each means."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from forge_ptq.runtime import Reduce, record_metric
from forge_ptq.services.verdict import Verdict

if TYPE_CHECKING:
    from forge_ptq.services.passage import Transition
    from forge_ptq.services.probation import Judgement

Values = list[tuple[str, float | None, Reduce]]


def record(verdict: Verdict) -> None:
    """Record what was measured; what was not, or is not a number, leaves no trace."""
    share = verdict.flop_share or {}
    served = verdict.outcome in ("accepted", "demoted")
    values: Values = [
        ("publish/accepted", float(served), Reduce.SUM),
        ("publish/demoted", float(verdict.outcome == "demoted"), Reduce.SUM),
        ("publish/fell_back", float(verdict.outcome == "fell_back"), Reduce.SUM),
        ("publish/kept", float(verdict.outcome == "kept"), Reduce.SUM),
        ("publish/refused", float(verdict.refused), Reduce.SUM),
        ("publish/perplexity_rise", verdict.perplexity_rise, Reduce.MEAN),
        ("publish/refused_rise", verdict.refused_rise, Reduce.MAX),
        ("publish/nll_perplexity_rise", verdict.nll_perplexity_rise, Reduce.MEAN),
        ("publish/kl", verdict.kl, Reduce.MEAN),
        ("publish/worst_sequence_rise", verdict.worst_sequence_rise, Reduce.MAX),
        ("publish/token_kl", verdict.token_kl, Reduce.MAX),
        ("publish/weight_error", verdict.weight_error, Reduce.MAX),
        ("publish/code_flip_fraction", verdict.code_flip_fraction, Reduce.MEAN),
        ("publish/probe_looks", float(verdict.probe_looks), Reduce.MEAN),
        ("publish/context_ess", verdict.context_ess, Reduce.MEAN),
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
        ("guard/steps", float(verdict.level), Reduce.MAX),
        ("guard/level", verdict.demoted_share, Reduce.MAX),
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
    _record(values)


def record_transition(transition: Transition) -> None:
    """Count what the state machine did; arrows that every publish takes are not counted."""
    to = transition.to
    values: Values = [
        ("guard/refusals", float(to == "refused"), Reduce.SUM),
        ("guard/failures", float(to == "failed"), Reduce.SUM),
        ("guard/demotions", float(to == "demote"), Reduce.SUM),
        ("guard/promotions", float(to == "promote"), Reduce.SUM),
        ("guard/fallbacks", float(to == "bf16"), Reduce.SUM),
        ("guard/keeps", float(to == "keep"), Reduce.SUM),
        ("guard/confirmations", float(to == "confirmed"), Reduce.SUM),
        ("guard/condemnations", float(to == "condemned"), Reduce.SUM),
        ("guard/rollbacks", float(to == "rolled_back"), Reduce.SUM),
    ]
    _record([entry for entry in values if entry[1]])


def record_judgement(judgement: Judgement) -> None:
    """What live traffic says of a plan."""
    numbers = judgement.numbers
    values: Values = [
        ("probation/episodes", numbers["episodes"], Reduce.SUM),
        ("probation/mismatch_k3", numbers["mismatch_k3"], Reduce.MEAN),
        ("probation/control_k3", numbers["control_k3"], Reduce.MEAN),
        ("probation/ess", numbers["ess"], Reduce.MIN),
        ("probation/left_out", numbers["left_out"], Reduce.MEAN),
        ("probation/alarms", float(bool(judgement.over)), Reduce.SUM),
    ]
    _record(values)


def record_ab(report: Any) -> None:
    """services.ab.ABReport: rewards of the quantized arm against full precision."""
    values: Values = [
        ("ab/agreement", report.agreement, Reduce.MEAN),
        ("ab/difference", report.difference, Reduce.MEAN),
        ("ab/p_value", report.p_value, Reduce.MIN),
    ]
    _record(values)


def _record(values: Values) -> None:
    for name, value, reduction in values:
        if value is not None and math.isfinite(value):
            record_metric(f"ptq/{name}", value, reduction)
