"""How a fleet cuts its work into items, and when a calibration has too little of it."""

import pytest

from forge_ptq.services.calibrating import (
    CalibrationError,
    _Account,
    _check_quorum,
    deal,
    primaries,
)
from forge_ptq.services.fleet_parts import chunks
from forge_ptq.services.round import Assignment, Item, WorkRound
from tests.integration.ptq_support import random_rollouts


@pytest.mark.parametrize(
    ("replicas", "oversample", "expected"),
    [(1, 1.2, 1), (2, 1.2, 1), (4, 1.2, 3), (6, 1.2, 5), (128, 1.2, 106), (4, 1.0, 4), (3, 9, 1)],
)
def test_primaries(replicas, oversample, expected):
    assert primaries(replicas, oversample) == expected


def test_batches_are_dealt_round_and_every_one_once():
    assert deal(list(range(7)), 3) == [[0, 3, 6], [1, 4], [2, 5]]
    assert deal([0], 3) == [[0], [], []]
    assert deal([], 2) == [[], []]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("rollouts", [1, 2, 7, 24])
def test_chunks_keep_the_order_and_are_about_equal(count, rollouts):
    given = random_rollouts(rollouts)
    pieces = chunks(given, count)
    assert [rollout for chunk in pieces for rollout in chunk] == given
    assert 1 <= len(pieces) <= count
    assert all(pieces)
    sizes = [sum(len(rollout.token_ids) for rollout in chunk) for chunk in pieces]
    longest = max(len(rollout.token_ids) for rollout in given)
    assert max(sizes) <= sum(sizes) / count + longest


def outcome_of(finished, failed=()):
    round_ = WorkRound([Item(name) for name in (*finished, *failed)], 2.0, 10.0, 0.0)
    for name in finished:
        claim = round_.claim(f"r-{name}", 0.0)
        assert isinstance(claim, Assignment)
        round_.finish(f"r-{name}", claim.item.id, None, 1.0)
    return round_.outcome(10.0)


def test_quorum_counts_missing_and_left_out_shares():
    _check_quorum(outcome_of("abcdef", "g"), {}, 7, 0.85)
    with pytest.raises(CalibrationError, match=r"5 of 7.*85%.*g no replica.*b was left out \(odd"):
        _check_quorum(outcome_of("abcdef", "g"), {"b": "odd"}, 7, 0.85)
    with pytest.raises(CalibrationError, match="0 of 1"):
        _check_quorum(outcome_of("a"), {"a": "NaN"}, 1, 0.0001)


def test_an_account_names_contributors_and_the_dropped_once():
    account = _Account()
    account.enter(outcome_of("ab", "c"), {"b": "odd"}, 1)
    account.enter(outcome_of("ab", "c"), {"b": "odd"}, 1)
    assert account.contributors == {"r-a"}
    assert list(account.dropped) == [
        "c of pass 1: no replica took it",
        "b of pass 1: left out, odd",
    ]
