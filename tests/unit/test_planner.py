"""The plan search against synthetic models of how errors add up."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from forge_ptq.numerics.planner import (
    COSTS,
    DYNAMIC,
    FULL,
    STATIC,
    Group,
    flop_shares,
    groups_of,
    ladder_of,
    local_errors,
    search,
)
from forge_ptq.numerics.sensitivity import EMBEDDING, typical_square, weight_error
from forge_ptq.numerics.stats import ActivationStats, measure

KINDS = {"q_proj": 0.3, "o_proj": 0.12, "gate_proj": 0.33, "down_proj": 0.25}
"""Share of a layer's FLOPs."""


def model(layers=12, seed=0, noise=0.0):
    """(groups, true log-rise per group and scheme): a few down_proj are far worse than the rest.

    The groups' own errors are right within a class up to a factor exp(noise * N(0, 1)).
    """
    generator = torch.Generator().manual_seed(seed)
    groups, truth = [], {}
    for layer, (kind, flops) in product(range(layers), KINDS.items()):
        name = f"model.layers.{layer}.{kind}"
        static = 10 ** float(-3.3 + 0.3 * torch.randn((), generator=generator))
        if kind == "down_proj":
            static *= 300 if layer in (2, 7) else 8
        true = {STATIC: static, DYNAMIC: static / 5 if kind != "down_proj" else static / 20}
        truth[name] = {**true, FULL: 0.0}
        unit = 40.0 if kind == "down_proj" else 7.0
        wrong = math.exp(noise * float(torch.randn((), generator=generator)))
        error = {scheme: value / unit * wrong for scheme, value in true.items()}
        groups.append(Group(name, (name,), kind, flops, {**error, FULL: 0.0}))
    return groups, truth


def additive(truth, calls=None):
    def evaluate(layers):
        if calls is not None:
            calls.append(dict(layers))
        return math.expm1(sum(truth[name][scheme] for name, scheme in layers.items()))

    return evaluate


def cost_of(groups, layers):
    return sum(COSTS[layers[g.members[0]]] * g.flops for g in groups)


def optimum(groups, truth, target):
    """Lagrangian bound: the best cost that any plan of the true additive model can have."""
    best = 0.0
    for exponent in torch.linspace(-3, 6, 400).tolist():
        lam = 10**exponent
        value = -lam * math.log1p(target)
        for g in groups:
            value += min(COSTS[s] * g.flops + lam * e for s, e in truth[g.name].items())
        best = max(best, value)
    return best


@pytest.mark.parametrize("budget", [0.03, 0.01])
@pytest.mark.parametrize("seed", range(4))
def test_near_optimal_on_additive_errors(budget, seed):
    groups, truth = model(seed=seed)
    result = search(groups, additive(truth), budget)
    assert result.reached
    assert result.rise <= 0.9 * budget
    assert len(result.measurements) <= 24
    assert cost_of(groups, result.layers) <= 1.02 * optimum(groups, truth, 0.9 * budget)
    assert sum(result.shares.values()) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(4))
def test_wrong_local_errors_are_measured_away(seed):
    groups, truth = model(seed=seed, noise=1.0)
    result = search(groups, additive(truth), 0.03, max_evaluations=40)
    assert result.reached
    assert cost_of(groups, result.layers) <= 1.12 * optimum(groups, truth, 0.027)


def test_interacting_errors_stay_within_budget():
    groups, truth = model()

    def evaluate(layers):
        total = sum(truth[name][scheme] for name, scheme in layers.items())
        neighbours = sum(
            layers[f"model.layers.{i}.down_proj"] != FULL
            and layers[f"model.layers.{i + 1}.q_proj"] == STATIC
            for i in range(11)
        )
        return math.expm1(total + 0.002 * neighbours + 3 * total**2)

    result = search(groups, evaluate, 0.03)
    assert result.reached
    assert evaluate(result.layers) == result.rise <= 0.027
    assert result.shares[STATIC] > 0.5


def test_everything_static_when_it_fits():
    groups, truth = model()
    calls: list[dict[str, str]] = []
    result = search(groups, additive(truth, calls), 10.0)
    assert set(result.layers.values()) == {STATIC}
    assert len(calls) == 1


def test_unreachable_and_zero_budgets_end_in_bf16():
    groups, truth = model()
    result = search(groups, lambda layers: 0.5, 0.03)
    assert set(result.layers.values()) == {FULL}
    assert (result.reached, result.rise) == (False, 0.5)
    result = search(groups, additive(truth), 0.0)
    assert set(result.layers.values()) == {FULL}
    assert (result.reached, result.rise) == (True, 0.0)
    assert len(result.measurements) <= 24
    result = search(groups, lambda layers: math.nan, 0.03)
    assert (result.reached, result.rise) == (False, math.inf)


def test_fixed_layers_stay():
    groups, truth = model()
    demanded = {"model.layers.2.down_proj": STATIC, "model.layers.5.o_proj": FULL}
    groups = [
        Group(g.name, g.members, g.kind, g.flops, g.error, demanded.get(g.name)) for g in groups
    ]
    truth["model.layers.2.down_proj"][STATIC] = 0.012
    calls: list[dict[str, str]] = []
    result = search(groups, additive(truth, calls), 0.03)
    assert result.reached
    for layers in calls:
        assert demanded.items() <= layers.items()
    truth["model.layers.2.down_proj"][STATIC] = 1.0
    result = search(groups, additive(truth), 0.03)
    assert not result.reached
    assert {s for name, s in result.layers.items() if name not in demanded} == {FULL}
    assert result.layers["model.layers.2.down_proj"] == STATIC


def test_members_of_a_group_move_together():
    shared = Group("q", ("q", "k", "v"), "q_proj", 1.0, {STATIC: 0.5, DYNAMIC: 0.4, FULL: 0.0})
    other = Group("o", ("o",), "o_proj", 1.0, {STATIC: 0.001, DYNAMIC: 0.0005, FULL: 0.0})

    def evaluate(layers):
        assert layers["q"] == layers["k"] == layers["v"]
        return 0.01 * (layers["o"] == STATIC) + (layers["q"] != FULL)

    result = search([shared, other], evaluate, 0.03)
    assert result.layers == {"q": FULL, "k": FULL, "v": FULL, "o": STATIC}


def test_a_plan_that_still_fits_is_the_start():
    groups, truth = model()
    first = search(groups, additive(truth), 0.03)
    calls: list[dict[str, str]] = []
    again = search(groups, additive(truth, calls), 0.03, start=first.layers, max_evaluations=6)
    assert again.reached
    assert cost_of(groups, again.layers) <= cost_of(groups, first.layers)
    assert len(calls) <= 6
    worse = {name: {s: 3 * e for s, e in errors.items()} for name, errors in truth.items()}
    assert search(groups, additive(worse), 0.03, start=first.layers).reached


@pytest.mark.parametrize("seed", range(3))
def test_a_start_is_refined_in_units_that_compare_across_classes(seed):
    groups, truth = model(seed=seed)
    # Local errors that make the most harmful class look a thousand times better than the others.
    wrong = [
        replace(g, error={s: e / 1000 for s, e in g.error.items()}) if g.kind == "down_proj" else g
        for g in groups
    ]
    start = search(wrong, additive(truth), 0.01).layers
    result = search(wrong, additive(truth), 0.03, start=start)
    assert result.reached
    assert cost_of(groups, result.layers) <= 1.02 * optimum(groups, truth, 0.027)
    # Too few evaluations to measure the classes: what fits is kept as it is.
    kept = search(wrong, additive(truth), 0.03, start=start, max_evaluations=8)
    assert kept.layers == start
    assert len(kept.measurements) == 2


@pytest.mark.parametrize("limit", [3, 4, 7, 11])
def test_few_evaluations_are_respected(limit):
    groups, truth = model()
    calls: list[dict[str, str]] = []
    result = search(groups, additive(truth, calls), 0.03, max_evaluations=limit)
    assert result.reached
    assert len(calls) <= limit
    with pytest.raises(ValueError, match="at least 3"):
        search(groups, additive(truth), 0.03, max_evaluations=2)


def test_the_ladder_skips_a_middle_scheme_that_saves_little():
    useful = Group("a", ("a",), "x", 1.0, {STATIC: 1.0, DYNAMIC: 0.1, FULL: 0.0})
    useless = Group("b", ("b",), "x", 1.0, {STATIC: 1.0, DYNAMIC: 0.9, FULL: 0.0})
    harmless = Group("c", ("c",), "x", 1.0, {STATIC: 0.0, DYNAMIC: 0.0, FULL: 0.0})
    fixed = Group("d", ("d",), "x", 1.0, {STATIC: 9.0, DYNAMIC: 0.0, FULL: 0.0}, STATIC)
    assert ladder_of([harmless, useless, useful, fixed]) == [
        ("a", STATIC, DYNAMIC),
        ("b", STATIC, FULL),
        ("a", DYNAMIC, FULL),
        ("c", STATIC, FULL),
    ]


def test_local_errors_match_simulated_rounding():
    torch.manual_seed(0)
    x_TC = torch.randn(3000, 64)
    stats = measure(x_TC)
    errors = local_errors(stats, stats.absmax)
    step = stats.absmax / 127
    static = ((x_TC / step).round() * step - x_TC).square().sum() / x_TC.square().sum()
    s_T1 = x_TC.abs().amax(1, keepdim=True) / 127
    dynamic = ((x_TC / s_T1).round() * s_T1 - x_TC).square().sum() / x_TC.square().sum()
    assert errors[STATIC] == pytest.approx(float(static), rel=0.1)
    assert errors[DYNAMIC] == pytest.approx(float(dynamic), rel=0.3)
    assert errors[FULL] == 0
    clipped = ((x_TC / 0.01).round().clamp(-127, 127) * 0.01 - x_TC).square().sum()
    assert local_errors(stats, 1.27)[STATIC] == pytest.approx(
        float(clipped / x_TC.square().sum()), rel=0.1
    )


def test_one_massive_token_ruins_static_and_leaves_dynamic():
    torch.manual_seed(0)
    x_TC = torch.randn(3000, 64)
    calm = local_errors(measure(x_TC), 5.0)
    x_TC[0, 3] = 3000
    stats = measure(x_TC)
    loud = local_errors(stats, stats.absmax)
    assert loud[STATIC] == pytest.approx(1.0, abs=0.05)
    assert loud[DYNAMIC] == pytest.approx(calm[DYNAMIC], rel=0.1)
    assert local_errors(ActivationStats.empty(8), 0.0) == {STATIC: 0.0, DYNAMIC: 0.0, FULL: 0.0}


def test_groups_of_a_model():
    names = ["l.0.q_proj", "l.0.k_proj", "l.0.v_proj", "l.0.o_proj", "l.1.o_proj"]
    shapes = {f"{name}.weight": (4, 8) for name in names}
    seen = measure(torch.randn(5, 8))
    stats = {"l.0.q_proj": seen, "l.0.o_proj": seen, "l.1.o_proj": ActivationStats.empty(8)}
    groups = groups_of(names, shapes, stats, dict.fromkeys(names[:4], 2.0), {"l.0.o_proj": FULL})
    assert [(g.name, g.kind, g.flops, g.fixed) for g in groups] == [
        ("l.0.q_proj", "q_proj", 96.0, None),
        ("l.0.o_proj", "o_proj", 32.0, FULL),
        ("l.1.o_proj", "o_proj", 32.0, DYNAMIC),
    ]
    assert groups[0].members == tuple(names[:3])
    shares = flop_shares(groups, {"l.0.q_proj": STATIC, "l.0.o_proj": FULL, "l.1.o_proj": DYNAMIC})
    assert shares == pytest.approx({STATIC: 0.6, FULL: 0.2, DYNAMIC: 0.2})


def test_what_writes_little_into_the_stream_matters_little():
    names = ["l.0.down_proj", "l.1.down_proj", "l.1.gate_proj"]
    shapes = {f"{name}.weight": (4, 8) for name in names}
    stats = {name: measure(torch.randn(50, 8)) for name in names}
    ranges = dict.fromkeys(names, 5.0)
    alone = groups_of(names, shapes, stats, ranges)
    # The stream holds 1 before the first; power is what a layer makes of an input of size 1.
    power = {"l.0.down_proj": 3.0, "l.1.down_proj": 12.0, EMBEDDING: 1.0}
    scaled = groups_of(names, shapes, stats, ranges, power=power)
    written = [typical_square(stats[name]) * power[name] for name in names[:2]]
    shares = [written[0] / (1 + written[0]), written[1] / (1 + sum(written)), 1.0]
    for before, after, share in zip(alone, scaled, shares, strict=True):
        for scheme, error in before.error.items():
            assert after.error[scheme] == pytest.approx(error * share)


def test_weight_errors_add_to_both_int8_schemes():
    torch.manual_seed(0)
    w_NC = torch.randn(32, 64)
    s_N1 = w_NC.abs().amax(1, keepdim=True) / 127
    simulated = float(((w_NC / s_N1).round() * s_N1 - w_NC).square().sum() / w_NC.square().sum())
    assert weight_error(w_NC) == pytest.approx(simulated, rel=0.2)
    loud_NC = w_NC.clone()
    loud_NC[:, 5] *= 100
    assert weight_error(loud_NC) > 100 * weight_error(w_NC)
    assert weight_error(torch.zeros(4, 8)) == 0
    stats = {"a.q_proj": measure(torch.randn(50, 8))}
    shapes = {"a.q_proj.weight": (4, 8)}
    plain = groups_of(["a.q_proj"], shapes, stats, {"a.q_proj": 4.0})[0]
    added = groups_of(
        ["a.q_proj"], shapes, stats, {"a.q_proj": 4.0}, weight_errors={"a.q_proj": 0.25}
    )[0]
    for scheme, extra in ((STATIC, 0.25), (DYNAMIC, 0.25), (FULL, 0.0)):
        assert added.error[scheme] == pytest.approx(plain.error[scheme] + extra)
