"""Calibration: to flat tensors and JSON and back, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch

from forge_ptq.numerics.calibration import Calibration, CalibrationFormatError
from forge_ptq.numerics.stats import measure


@pytest.fixture
def calibration() -> Calibration:
    torch.manual_seed(0)
    return Calibration(
        round=7,
        policy_version=300,
        layers={"a.q_proj": "int8_static", "b": "bf16", "c": "int8_dynamic"},
        absmax={"a.q_proj": 0.1, "b": 3e38, "c": 0.0},
        shift={
            "a.q_proj": torch.tensor([-15, 0, 3], dtype=torch.int8),
            "c": torch.tensor([1], dtype=torch.int8),
        },
        stats={"a.q_proj": measure(torch.randn(9, 3)), "b": measure(torch.randn(4, 5) * 100)},
        tokens=9,
        contributors=("host:1", "host:2"),
        dropped=("host:3: silent",),
        predicted_rise=0.021,
        alpha={"a.q_proj": 0.65},
        range_method="mse",
        budget=0.025,
        asked={"mode": "auto", "overrides": {"*.b": "bf16"}},
    )


def test_round_trip_is_exact(calibration):
    tensors, text = calibration.to_tensors()
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    back = Calibration.from_tensors({k: t.clone() for k, t in tensors.items()}, text)
    for name in (
        "round", "policy_version", "layers", "absmax", "tokens", "contributors", "range_method",
        "budget", "asked",
    ):  # fmt: skip
        assert getattr(back, name) == getattr(calibration, name)
    assert (back.dropped, back.predicted_rise, back.alpha) == (
        calibration.dropped,
        calibration.predicted_rise,
        calibration.alpha,
    )
    assert list(back.shift) == list(calibration.shift)
    assert all(torch.equal(back.shift[name], calibration.shift[name]) for name in back.shift)
    assert list(back.stats) == list(calibration.stats)
    for name, stats in calibration.stats.items():
        assert torch.equal(back.stats[name].absmax_C, stats.absmax_C)
        assert torch.equal(back.stats[name].sum_sq_C, stats.sum_sq_C)
        assert torch.equal(back.stats[name].histogram_B, stats.histogram_B)
        assert (back.stats[name].tokens, back.stats[name].sum) == (stats.tokens, stats.sum)


def test_an_unsmoothed_calibration_without_statistics(calibration):
    plain = replace(calibration, shift={}, stats={}, predicted_rise=float("nan"), alpha={})
    back = Calibration.from_tensors(*plain.to_tensors())
    assert (back.shift, back.stats, back.predicted_rise) == ({}, {}, None)
    assert back.layers == calibration.layers


def test_non_finite_ranges_and_wrong_factors_are_not_stored(calibration):
    with pytest.raises(ValueError, match="b: its calibrated range is nan"):
        replace(calibration, absmax={"b": float("nan")}).to_tensors()
    with pytest.raises(ValueError, match="c: factors must be int8"):
        replace(calibration, shift={"c": torch.zeros(3)}).to_tensors()


def test_anything_else_is_refused(calibration):
    tensors, text = calibration.to_tensors()
    record = json.loads(text)
    broken: list[tuple[dict, str]] = [
        (tensors, "{}"),
        (tensors, "not json"),
        (tensors, json.dumps({**record, "schema": 1})),
        (tensors, json.dumps({**record, "layers": {"a": "int3"}})),
        (tensors, json.dumps({**record, "shift": {"a.q_proj": 17}})),
        ({k: t for k, t in tensors.items() if k != "stats.histogram"}, text),
        ({k: t for k, t in tensors.items() if k != "shift"}, text),
    ]
    for parts, given in broken:
        with pytest.raises(CalibrationFormatError):
            Calibration.from_tensors(parts, given)
