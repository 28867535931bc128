"""The ladder's states and its memory, on random walks against references written another way."""

import itertools
import json
import random

import pytest

from forge_ptq.services.ladder import Ladder, Move, Step, next_rung, overlaid, pick
from forge_ptq.services.passage import LadderError, Passage, State, Transition, finite

ARROWS = """
    prepare: probed accepted refused failed promote demote bf16 keep
    probed: probed accepted refused failed
    accepted: committed refused failed
    refused: demote bf16 keep failed
    failed: bf16 keep
    demote: prepare
    promote: prepare
    bf16: prepare
    committed: probation confirmed
    probation: confirmed condemned
    confirmed: condemned
    condemned: rolled_back
    keep:
    rolled_back:
"""
NEXT = {
    line.split(":")[0].strip(): set(line.split(":")[1].split())
    for line in ARROWS.strip().splitlines()
}


@pytest.mark.parametrize(("old", "new"), list(itertools.product(State, State)))
def test_every_arrow_and_no_other(old, new):
    passage = Passage(7, old)
    if str(new) in NEXT[str(old)]:
        taken = passage.to(new, "why", {"x": 1.0}, "id")
        assert taken == Transition(str(old), str(new), "why", {"x": 1.0}, 7, "id")
        assert (passage.state, passage.transitions) == (new, [taken])
    else:
        with pytest.raises(LadderError, match=f"version 7: no transition from {old} to {new}"):
            passage.to(new, "why")
        assert (passage.state, passage.transitions) == (old, [])


def test_random_walks_keep_what_the_diagram_promises():
    rng = random.Random(0)
    ends = set()
    for _ in range(2000):
        passage = Passage(1)
        for _ in range(40):
            if not NEXT[str(passage.state)]:
                break
            passage.to(State(rng.choice(sorted(NEXT[str(passage.state)]))), "walk")
        path = ["prepare"] + [t.to for t in passage.transitions]
        assert all(t.from_ == before for t, before in zip(passage.transitions, path, strict=False))
        ends.add(path[-1])
        if "committed" in path:
            at = path.index("committed")
            assert path.count("committed") == 1
            assert path[at - 1] == "accepted"
            assert not {"refused", "keep", "failed"} & set(path[at:])
        for at, state in enumerate(path):
            if state in ("refused", "failed"):  # nothing serves before another candidate is made
                rest = path[at + 1 :]
                fresh = rest.index("prepare") if "prepare" in rest else len(rest)
                assert "committed" not in rest[:fresh]
            if state == "rolled_back":
                assert path[at - 1] == "condemned"
                assert "committed" in path[:at]
    assert {"keep", "rolled_back"} <= ends


def test_a_transition_reads_as_one_line():
    passage = Passage(3)
    passage.to(State.PROBED, "rise 5%", {"rise": 0.0512345, "tokens": 300.0}, "v3-ab")
    line = str(passage.transitions[0])
    assert line == "version 3 v3-ab: prepare -> probed: rise 5% (rise 0.05123, tokens 300)"
    assert finite({"a": None, "b": float("nan"), "c": float("inf"), "d": 1}) == {"d": 1.0}


@pytest.mark.parametrize(
    ("rungs", "expected"),
    [
        (["demote", "bf16", "keep"], ["demote", "demote", "bf16", "bf16"]),
        (["demote", "keep"], ["demote", "demote", "keep", "keep"]),
        (["bf16"], ["bf16"] * 4),
        (["keep"], ["keep"] * 4),
        ([], ["keep"] * 4),
    ],
)
def test_rungs(rungs, expected):
    assert [str(next_rung(rungs, made, 2)) for made in range(4)] == expected


def move(name: str, old: str, new: str, flops: float) -> Move:
    return Move(tuple(f"{name}.{part}" for part in "qkv"), old, new, flops)


def test_a_demotion_takes_whole_groups_in_order_up_to_its_share():
    moves = [
        move("b", "int8_static", "int8_dynamic", 0.1),
        move("b", "int8_dynamic", "bf16", 0.1),
        move("a", "int8_dynamic", "bf16", 0.1),
        move("c", "int8_static", "bf16", 0.4),
    ]
    b = dict.fromkeys(("b.q", "b.k", "b.v"), "int8_dynamic")
    a = dict.fromkeys(("a.q", "a.k", "a.v"), "bf16")
    c = dict.fromkeys(("c.q", "c.k", "c.v"), "bf16")
    assert pick(moves, 0.05) == b
    assert pick(moves, 0.1) == b
    assert pick(moves, 0.15) == b | a  # not b's second move: one scheme at a time
    assert pick(moves, 0.2) == b | a
    assert pick(moves, 0.21) == b | a | c
    assert pick(moves, 1.0) == b | a | c
    assert pick([], 0.5) == {}


def test_an_overlay_only_improves():
    planned = {"a": "int8_static", "b": "int8_dynamic", "c": "bf16"}
    assert overlaid(planned, {"a": "bf16", "b": "int8_static", "c": "int8_dynamic"}) == {
        "a": "bf16", "b": "int8_dynamic", "c": "bf16",
    }  # fmt: skip
    assert overlaid(planned, {"d": "bf16"}) == planned


def test_steps_come_to_the_best_scheme_of_each_layer():
    ladder = Ladder(5)
    ladder.push(Step({"a": "int8_dynamic", "b": "bf16"}))
    ladder.push(Step({"a": "bf16", "b": "int8_dynamic", "c": "int8_dynamic"}))
    assert ladder.overlay == {"a": "bf16", "b": "bf16", "c": "int8_dynamic"}
    assert not ladder.whole
    ladder.push(Step(whole=True))
    assert ladder.whole
    assert ladder.level == 3


def test_recovery_and_its_back_off():
    """One step, taken back after 3, then in vain, so after 6, 12; then for good."""
    ladder = Ladder(3)
    ladder.failed()
    ladder.push(Step({"a": "bf16"}))

    def good(count: int) -> None:
        for _ in range(count):
            assert ladder.begin() is None
            ladder.passed()

    for wait in (3, 6, 12):
        good(wait)
        assert ladder.begin() is not None
        assert ladder.level == 0
        ladder.failed()
        again = ladder.again({"a": "int8_dynamic"})
        assert again is not None
        ladder.push(again)
    assert ladder.steps == [Step({"a": "bf16"}, failures=3)]
    good(24)
    assert ladder.begin() is not None
    good(23)
    assert ladder.trial is not None
    good(1)
    assert ladder.trial is None
    ladder.failed()
    assert ladder.again({"a": "int8_dynamic"}) is None, "a later failure is a new one"


def test_a_step_on_trial_that_would_change_nothing_is_not_taken_again():
    ladder = Ladder(1)
    ladder.push(Step({"a": "int8_dynamic"}))
    ladder.passed()
    assert ladder.begin() == Step({"a": "int8_dynamic"})
    assert ladder.again({"a": "bf16"}) is None
    assert ladder.trial is None


def test_a_failed_probation_is_owed_one_step_and_bans_for_good():
    ladder = Ladder(1)
    ladder.push(Step({"a": "int8_dynamic"}))
    mark = len(ladder.condemned)
    ladder.passed()
    ladder.condemn("p", {"v3-x": 3, "v4-y": 4})
    assert (ladder.owed, ladder.streak) == (1, 0)
    assert ladder.banned == {"v3-x": 3, "v4-y": 4}
    assert ladder.begin() is None, "nothing is taken back while something is owed"
    assert ladder.guilty_since(mark, "p")
    assert not ladder.guilty_since(mark, "q")
    assert not ladder.guilty_since(len(ladder.condemned), "p")
    ladder.push(Step({"b": "bf16"}))
    assert ladder.owed == 0
    assert ladder.banned == {"v3-x": 3, "v4-y": 4}


class Reference:
    """Recomputes everything from the whole list of events at every question."""

    def __init__(self, recover_after: int) -> None:
        self.after = recover_after
        self.events: list[tuple[str, int]] = []

    def replay(self) -> tuple[list[tuple[int, int]], int, tuple[int, int] | None, int]:
        """(steps as (name, failures), good in a row, step on trial, owed)."""
        steps: list[tuple[int, int]] = []
        on_trial: tuple[int, int] | None = None
        since, owed = 0, 0
        for kind, name in self.events:
            if kind == "passed":
                since += 1
                if on_trial is not None and since >= self.after * 2 ** on_trial[1]:
                    on_trial = None
                continue
            since = 0
            if kind == "promoted":
                on_trial = steps.pop()
            elif kind == "condemned":
                owed += 1
            elif kind == "again":
                assert on_trial is not None
                steps.append((on_trial[0], on_trial[1] + 1))
                on_trial, owed = None, max(0, owed - 1)
            elif kind == "pushed":
                steps.append((name, 0))
                owed = max(0, owed - 1)
        return steps, since, on_trial, owed

    def due(self) -> bool:
        steps, since, on_trial, owed = self.replay()
        return (
            bool(steps)
            and not owed
            and on_trial is None
            and since >= self.after * 2 ** steps[-1][1]
        )


@pytest.mark.parametrize("seed", range(20))
def test_memory_on_random_walks(seed):
    rng = random.Random(seed)
    after = rng.choice([1, 2, 3])
    ladder, reference = Ladder(after), Reference(after)
    fresh = itertools.count()
    for _ in range(300):
        due = reference.due()
        taken = ladder.begin()
        assert (taken is not None) == due
        if due:
            reference.events.append(("promoted", 0))
        kind = rng.choices(["passed", "failed", "condemned", "nothing"], [12, 2, 1, 1])[0]
        if kind == "passed" and not ladder.owed:
            ladder.passed()
            reference.events.append(("passed", 0))
        elif kind == "condemned":
            ladder.condemn("p", {})
            reference.events.append(("condemned", 0))
        elif kind == "failed" or ladder.owed:
            if kind == "failed":
                ladder.failed()
                reference.events.append(("failed", 0))
            on_trial = reference.replay()[2]
            step = ladder.again(None)
            assert (step is not None) == (on_trial is not None)
            if step is not None:
                reference.events.append(("again", 0))
            else:
                name = next(fresh)
                step = Step({f"l{name}": "bf16"})
                reference.events.append(("pushed", name))
            ladder.push(step)
        if rng.random() < 0.1:  # a restart in between changes nothing
            other = Ladder(after)
            other.restore(json.loads(json.dumps(ladder.state())))
            ladder = other
        steps, since, on_trial, owed = reference.replay()
        assert [(dict(s.layers), s.failures) for s in ladder.steps] == [
            ({f"l{name}": "bf16"}, failures) for name, failures in steps
        ]
        assert (ladder.streak, ladder.owed) == (since, owed)
        assert (ladder.trial is None) == (on_trial is None)
        assert set(ladder.overlay) == {f"l{name}" for name, _ in steps}


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 9},
        {"steps": 3},
        {"steps": [{"layers": {"a": "int3"}, "whole": False, "failures": 0}]},
        {"steps": [{"layers": {}}]},
        {"streak": None},
        {"banned": ["x"]},
    ],
)
def test_a_state_that_is_none_is_refused(change):
    state = Ladder(2).state() | change
    with pytest.raises(ValueError, match="ladder: "):
        Ladder(2).restore(state)
    with pytest.raises(ValueError, match="ladder: "):
        Ladder(2).restore({})
