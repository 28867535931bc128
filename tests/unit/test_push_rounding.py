"""What rounding a push costs: divergences against a closed form."""

import math

import pytest
import torch

from apps.bench.push_rounding import apart, int8


def test_divergences_of_two_coins():
    """Sampler 1/2, trainer 1/4 on token 0."""
    gen = torch.tensor([[0.5, 0.5]] * 4).log()
    own = torch.tensor([[0.25, 0.75]] * 4).log()
    found = apart([gen[:3], gen[3:]], [own[:3], own[3:]], [[0, 1, 1], [0]])
    kl = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    k3 = [r - math.log(r) - 1 for r in (0.5, 1.5, 1.5, 0.5)]
    assert found["kl"] == pytest.approx(kl)
    assert found["k3"] == pytest.approx(sum(k3) / 4)
    assert apart([gen], [gen], [[0, 1, 0, 1]]) == {"kl": 0.0, "k3": 0.0}


def test_int8_moves_each_weight_by_half_a_step_at_most_and_no_other_tensor():
    state = {"a.weight": torch.randn(5, 40), "norm.weight": torch.randn(7)}
    got = int8(state, ["a"])
    step_N1 = state["a.weight"].abs().amax(1, keepdim=True) / 127
    error_NK = (got["a.weight"] - state["a.weight"]).abs()
    assert bool((error_NK <= 0.51 * step_N1).all())
    assert float(error_NK.max()) > 0
    assert got["norm.weight"] is state["norm.weight"]
