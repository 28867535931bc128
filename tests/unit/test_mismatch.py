"""Numbers of the mismatch against their definitions, and exactly additive."""

import math
import random

import pytest
import torch

from forge_ptq.config.guard import ProbationConfig
from forge_ptq.config.loss import AlarmsConfig
from forge_ptq.mismatch import (
    COLUMNS,
    MAXIMA,
    age_label,
    alarms,
    as_rows,
    reduce,
    scheme_label,
    sequence_rows,
    split,
)


def rows_of(gaps: list[list[float]]) -> list[dict[str, float]]:
    """Rows of sequences with these gaps, none left out; ragged ones are padded with NaN."""
    width = max(map(len, gaps), default=0)
    padded = torch.tensor([g + [math.nan] * (width - len(g)) for g in gaps])
    mask = ~padded.isnan()
    none = torch.zeros_like(mask)
    return as_rows(sequence_rows(padded, mask, mask, none, none, none))


GAPS = [[0.1, -0.4, 0.03], [2.0], [-1.5, 0.2], [0.0, 0.0, 0.0, 0.0]]


def test_definitions():
    flat = [g for gaps in GAPS for g in gaps]
    ratios = [math.exp(g) for g in flat]
    n, mean = len(flat), sum(ratios) / len(flat)
    numbers = reduce(rows_of(GAPS))
    assert numbers["mismatch_k1"] == pytest.approx(-sum(flat) / n)
    k3 = sum(r - 1 - g for r, g in zip(ratios, flat, strict=True)) / n
    assert numbers["mismatch_k3"] == pytest.approx(k3)
    assert numbers["ratio_mean"] == pytest.approx(mean)
    variance = sum((r - mean) ** 2 for r in ratios) / n
    assert numbers["ratio_std"] == pytest.approx(math.sqrt(variance))
    assert numbers["ratio_max"] == pytest.approx(math.exp(2.0))
    assert numbers["ess"] == pytest.approx(sum(ratios) ** 2 / n / sum(r * r for r in ratios))
    assert numbers["max_abs_gap"] == pytest.approx(2.0)


def test_k1_and_k3_estimate_the_kl_of_generator_and_trainer():
    """Against the exact KL of two known distributions, from samples of the generator's."""
    generator = torch.Generator().manual_seed(0)
    p = torch.softmax(torch.randn(16, generator=generator), -1)
    q = torch.softmax(p.log() + 0.3 * torch.randn(16, generator=generator), -1)
    exact = float((p * (p / q).log()).sum())
    drawn = torch.multinomial(p, 200_000, replacement=True, generator=generator)
    numbers = reduce(rows_of((q / p).log()[drawn].view(50, 4000).tolist()))
    assert exact > 0.02
    assert numbers["mismatch_k1"] == pytest.approx(exact, rel=0.1)
    assert numbers["mismatch_k3"] == pytest.approx(exact, rel=0.02)
    assert numbers["ratio_mean"] == pytest.approx(1.0, abs=0.01)


def test_tiny_gaps_keep_their_digits():
    gap = 1e-5
    numbers = reduce(rows_of([[gap, -gap]] * 3))
    assert numbers["mismatch_k3"] == pytest.approx(gap**2 / 2, rel=1e-4)


def test_ess_of_one_dominant_token_is_one_token():
    assert reduce(rows_of([[15.0] + [-5.0] * 99]))["ess"] == pytest.approx(0.01, rel=1e-3)
    assert reduce(rows_of([[0.3] * 7, [0.3]]))["ess"] == pytest.approx(1.0)


def test_any_split_and_order_of_the_rows_gives_the_same():
    whole = rows_of(GAPS)
    numbers = reduce(whole)
    parts = [row for gaps in GAPS for row in rows_of([gaps])]  # other widths of padding
    assert parts == whole
    for seed in range(5):
        shuffled = random.Random(seed).sample(whole, len(whole))
        assert reduce(shuffled) == pytest.approx(numbers, rel=1e-12)
    assert set(whole[0]) == set(COLUMNS) >= MAXIMA


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
def test_nothing_to_compare(shape):
    none = torch.zeros(shape, dtype=torch.bool)
    rows = as_rows(sequence_rows(torch.full(shape, math.nan), none, none, none, none, none))
    assert len(rows) == shape[0]
    assert set(reduce(rows).values()) == {0.0}
    assert split(rows, ["bf16"] * shape[0], [0] * shape[0]) == {}


def test_left_out_tokens_are_counted_over_all_response_tokens():
    response = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    none = torch.zeros_like(response)
    valid = response.clone()
    valid[0, 2] = False  # not finite, and a token of the response all the same
    first, second = response & torch.tensor([[1], [0]]).bool(), none.clone()
    second[1, 0] = True
    rows = as_rows(sequence_rows(torch.zeros(2, 4), response, valid, second, first, none))
    numbers = reduce(rows)
    assert numbers["masked_fraction"] == 1 / 7
    assert numbers["vetoed_fraction"] == 3 / 7
    assert numbers["ess"] == 1.0  # what a mask leaves out is still compared


def test_split_by_scheme_and_age():
    rows = rows_of(GAPS)
    schemes = ["bf16", "int8_dynamic+bf16", "bf16+int8_dynamic", "bf16"]
    parts = split(rows, schemes, [0, 1, 1, 9])
    assert parts["mismatch_k3/bf16"] == reduce([rows[0], rows[3]])["mismatch_k3"]
    assert parts["ess/bf16_int8_dynamic"] == reduce(rows[1:3])["ess"]
    assert parts["ratio_max/age_1"] == pytest.approx(math.exp(2.0))
    labels = {name.partition("/")[2] for name in parts}
    assert labels == {"bf16", "bf16_int8_dynamic", "age_0", "age_1", "age_4_up"}
    assert {name.partition("/")[0] for name in parts} == set(reduce(rows))
    assert split(rows, None, None) == {}
    with pytest.raises(ValueError, match=r"shorter|longer"):
        split(rows, ["bf16"], None)


def test_labels():
    assert scheme_label("int8_static+int8_dynamic") == "int8_dynamic_int8_static"
    assert scheme_label("") == scheme_label("?") == "unknown"
    assert [age_label(a) for a in (0, 3, 4, 70)] == ["age_0", "age_3", "age_4_up", "age_4_up"]


def test_alarms_name_key_value_and_limit():
    quiet = reduce(rows_of(GAPS[:1]))
    assert alarms(quiet, ProbationConfig(), AlarmsConfig()) == []
    assert alarms({}, ProbationConfig(), AlarmsConfig()) == []
    loud = {**quiet, "mismatch_k3": 0.2, "ess": 0.3, "masked_fraction": 0.21, "max_abs_gap": 13.0}
    loud |= {"vetoed_fraction": 0.06, "rejected_fraction": 1e-6}
    raised = alarms(loud, ProbationConfig(), AlarmsConfig())
    assert {a.metric for a in raised} == {
        "mismatch_k3", "ess", "masked_fraction", "max_abs_gap", "vetoed_fraction",
        "rejected_fraction",
    }  # fmt: skip
    texts = [str(a) for a in raised]
    assert "mismatch_k3 0.2 is over ptq.guard.probation.max_mismatch_kl = 0.05" in texts
    assert "ess 0.3 is under ptq.guard.probation.min_ess = 0.5" in texts
    assert "max_abs_gap 13 is over alarms.max_abs_gap = 12" in texts


def test_alarms_follow_the_configuration_and_not_a_number_raises_one():
    probation = ProbationConfig(max_mismatch_kl=0.5, min_ess=0.1)
    metrics = {"mismatch_k3": 0.2, "ess": 0.3, "masked_fraction": 1.0}
    assert alarms(metrics, probation, AlarmsConfig(max_masked_fraction=1.0)) == []
    assert [a.metric for a in alarms({"ess": math.nan}, probation, AlarmsConfig())] == ["ess"]
