"""Which arm a prompt goes to."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest

from forge_ptq.config import PTQConfig
from forge_ptq.config.guard import ABConfig, PrecisionByLoadConfig
from forge_ptq.engine.admission import Admission


def test_off_is_live_whatever_there_is() -> None:
    for config in (None, {}, {"mode": "off"}):
        admission = Admission.from_config(config)
        assert {admission.choose([1, i], 0, True).arm for i in range(50)} == {"live"}


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.83])
@pytest.mark.parametrize("same_prompt", [True, False])
def test_ab_sends_its_fraction(fraction: float, same_prompt: bool) -> None:
    """Within four standard errors, for one prompt asked again and again as for different ones."""
    admission = Admission.from_config({"mode": "ab", "fraction": fraction})
    n = 4000
    choices = [admission.choose([7, 0 if same_prompt else i], 9, True) for i in range(n)]
    share = sum(c.arm == "companion" for c in choices) / n
    assert abs(share - fraction) < 4 * math.sqrt(fraction * (1 - fraction) / n)
    assert all(c.drawn for c in choices)


def test_ab_lots_have_no_memory() -> None:
    """Neighbouring calls are independent: as many runs as of a fair coin, and no prompt is bound
    to an arm."""
    admission = Admission("ab", 0.5)
    arms = [admission.choose([i % 10], 0, True).arm for i in range(4000)]
    changes = sum(a != b for a, b in itertools.pairwise(arms))
    assert abs(changes - 2000) < 4 * math.sqrt(1000)
    for prompt in range(10):
        assert 140 < arms[prompt::10].count("companion") < 260


def test_ab_repeats_itself() -> None:
    """The same calls in the same order give the same arms, whether or not the load differs."""
    one, two = Admission("ab", 0.5), Admission("ab", 0.5)
    calls = [[i % 7, i] for i in range(200)]
    assert [one.choose(p, 0, True) for p in calls] == [two.choose(p, 99, True) for p in calls]


def test_without_a_companion_nothing_is_drawn() -> None:
    admission = Admission("ab", 0.99)
    choices = [admission.choose([i], 0, False) for i in range(20)]
    assert {(c.arm, c.drawn) for c in choices} == {("live", False)}


def test_load_has_hysteresis() -> None:
    admission = Admission.from_config({"mode": "load", "bf16_below": 4, "int8_above": 16})
    loads = [0, 4, 5, 15, 16, 40, 15, 5, 4, 9, 15, 16, 5, 3]
    arms = [admission.choose([1], load, True).arm for load in loads]
    full, int8 = "companion", "live"
    assert arms == [full] * 4 + [int8] * 4 + [full] * 3 + [int8] * 2 + [full]
    assert not any(admission.choose([1], 0, True).drawn for _ in range(3)), "load is no lot"


def test_load_is_watched_while_there_is_no_companion() -> None:
    """A companion that comes under load does not take the first prompts for that."""
    admission = Admission("load", bf16_below=4, int8_above=16)
    assert admission.choose([1], 20, False).arm == "live"
    assert admission.choose([1], 10, True).arm == "live"
    assert admission.choose([1], 4, True).arm == "companion"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mode": "both"}, "admission.mode is 'both', expected one of off, ab, load"),
        ({"mode": "ab", "fraction": 1.0}, "admission.fraction is 1.0"),
        ({"mode": "ab", "fraction": True}, "admission.fraction is True"),
        ({"mode": "ab", "int8_above": 3}, "admission.int8_above: mode 'ab' has no such key"),
        ({"fraction": 0.5}, "admission.fraction: mode 'off' has no such key"),
        ({"mode": "load", "bf16_below": 16}, "bf16_below is 16, expected less than int8_above=16"),
        ({"mode": "load", "bf16_below": -1}, "admission.bf16_below is -1"),
    ],
)
def test_wrong_configurations_name_the_key(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Admission.from_config(config)


@pytest.mark.parametrize(
    ("block", "enabled", "expected"),
    [
        ({}, True, ("off", 0.5, 4, 16)),
        ({"ab": ABConfig(enabled=True, fraction=0.25)}, True, ("ab", 0.25, 4, 16)),
        ({"ab": ABConfig(enabled=True)}, False, ("off", 0.5, 4, 16)),
        (
            {"precision_by_load": PrecisionByLoadConfig(enabled=True, bf16_below=2, int8_above=9)},
            True,
            ("load", 0.5, 2, 9),
        ),
    ],
)
def test_the_loop_hands_on_what_is_configured(
    block: dict[str, Any], enabled: bool, expected: tuple[Any, ...]
) -> None:
    from apps.grpo_ptq.components import admission

    cfg: Any = SimpleNamespace(ptq=PTQConfig(enabled=enabled, **block))
    got = Admission.from_config(admission(cfg))
    assert (got.mode, got.fraction, got.bf16_below, got.int8_above) == expected
