"""WorkRound on a simulated clock: takeovers, late finishes, failures, stalls, deadlines."""

import pickle
import random

import pytest

from forge_ptq.services.round import WAIT, Assignment, Item, WorkRound

BEAT, DEADLINE = 2.0, 100.0


def make(count=2, **options):
    items = [Item(f"i{index}", index) for index in range(count)]
    return WorkRound(items, BEAT, DEADLINE, 0.0, **options)


def claim(round_, replica, now):
    claim = round_.claim(replica, now)
    assert isinstance(claim, Assignment), claim
    return claim.item.id, claim.attempt


def keep_alive(round_, replica, start, end, progress=None, step=1.0):
    """Beats from start to end; returns what the last one said."""
    answer, now = True, start
    while now <= end:
        answer = round_.beat(replica, now, progress)
        now += step
    return answer


def test_items_are_dealt_in_order_and_the_round_ends_with_the_last_result():
    round_ = make(2)
    assert claim(round_, "a", 0) == ("i0", 0)
    assert claim(round_, "b", 0) == ("i1", 0)
    assert round_.claim("c", 0.5) is WAIT
    assert round_.finish("a", "i0", "A", 1)
    assert not round_.over(1)
    assert round_.claim("a", 1) is WAIT
    assert round_.finish("b", "i1", "B", 1.5)
    assert round_.over(1.5)
    assert round_.claim("a", 1.5) is None
    outcome = round_.outcome(50)
    assert outcome.complete
    assert outcome.finished == {"i0": "A", "i1": "B"}
    assert outcome.owners == {"i0": "a", "i1": "b"}
    assert outcome.attempts == {"i0": 0, "i1": 0}
    assert outcome.takeovers == []
    assert outcome.replicas == ("a", "b", "c")
    assert outcome.seconds == 1.5
    assert not outcome.expired


def test_zero_items_is_over_at_once():
    round_ = make(0)
    assert round_.over(0)
    assert round_.claim("a", 0) is None
    outcome = round_.outcome(3)
    assert outcome.complete
    assert outcome.seconds == 0


def test_zero_replicas_expire_and_name_every_item():
    round_ = make(2)
    assert not round_.over(DEADLINE - 0.001)
    assert round_.over(DEADLINE)
    outcome = round_.outcome(DEADLINE + 5)
    assert outcome.expired
    assert outcome.seconds == DEADLINE
    assert outcome.missing == {"i0": "no replica took it", "i1": "no replica took it"}


def test_a_silent_owner_is_replaced_after_one_heartbeat_and_not_before():
    round_ = make(1)
    claim(round_, "a", 0)
    assert round_.beat("a", 1.0)
    assert round_.claim("b", 3.0) is WAIT
    assert claim(round_, "b", 3.01) == ("i0", 1)
    assert round_.finish("b", "i0", "B", 4)
    outcome = round_.outcome(5.1)
    assert outcome.takeovers == [("i0", "a", "b")]
    assert outcome.lost == ("a",)
    assert outcome.silent == ("a",)
    assert outcome.attempts == {"i0": 1}


def test_first_finish_wins_whoever_it_is_by():
    round_ = make(1)
    claim(round_, "a", 0)
    claim(round_, "b", 3)
    assert round_.finish("a", "i0", "late but first", 3.5)
    assert not round_.beat("b", 3.6)
    assert not round_.finish("b", "i0", "second", 4)
    outcome = round_.outcome(4)
    assert outcome.finished == {"i0": "late but first"}
    assert outcome.owners == {"i0": "a"}
    assert outcome.attempts == {"i0": 0}


def test_finishing_twice_counts_once():
    round_ = make(2)
    claim(round_, "a", 0)
    assert round_.finish("a", "i0", 1, 1)
    assert not round_.finish("a", "i0", 2, 1)
    assert round_.outcome(1).finished == {"i0": 1}


def test_an_owner_that_comes_back_keeps_its_item():
    """Stopped and continued: it may go on, and while it beats nobody else gets the item."""
    round_ = make(1)
    claim(round_, "a", 0)
    claim(round_, "b", 5)
    assert round_.beat("a", 6)
    assert keep_alive(round_, "a", 6, 20)
    assert round_.claim("c", 20) is WAIT
    assert round_.finish("a", "i0", "A", 21)
    assert not round_.beat("a", 22)


def test_what_was_never_claimed_cannot_be_finished():
    round_ = make(1)
    with pytest.raises(ValueError, match="never claimed"):
        round_.finish("a", "i0", 1, 0)
    with pytest.raises(ValueError, match="no item 'i9'"):
        round_.finish("a", "i9", 1, 0)
    with pytest.raises(ValueError, match="no item 'i9'"):
        round_.fail("a", "i9", "x", 0)


def test_bad_arguments():
    with pytest.raises(ValueError, match="twice"):
        WorkRound([Item("a"), Item("a")], 1, 1, 0)
    with pytest.raises(ValueError, match="positive"):
        WorkRound([], 0, 1, 0)
    with pytest.raises(ValueError, match="positive"):
        WorkRound([], 1, -1, 0)


def test_claiming_again_gives_up_what_was_held():
    round_ = make(2)
    claim(round_, "a", 0)
    assert claim(round_, "a", 1) == ("i1", 0)
    assert claim(round_, "b", 1) == ("i0", 1)
    outcome = round_.outcome(1)
    assert outcome.lost == ()
    assert outcome.takeovers == [("i0", "a", "b")]
    assert not round_.beat("c", 1)  # holds nothing


def test_one_replica_alone_takes_its_own_item_again():
    round_ = make(1)
    claim(round_, "a", 0)
    assert claim(round_, "a", 1) == ("i0", 1)
    assert round_.outcome(1).takeovers == []


def test_same_error_twice_gives_an_item_up_and_the_rest_goes_on():
    round_ = make(2)
    claim(round_, "a", 0)
    round_.fail("a", "i0", "boom", 1)
    assert claim(round_, "b", 1) == ("i1", 0)
    assert round_.claim("a", 1) is WAIT  # not the item it failed on
    assert claim(round_, "c", 1) == ("i0", 1)
    round_.fail("c", "i0", "boom", 2)
    assert not round_.over(2)
    round_.finish("b", "i1", "B", 3)
    assert round_.over(3)
    outcome = round_.outcome(3)
    assert outcome.missing == {"i0": "failed on a, c: boom"}
    assert outcome.errors == {"a": "boom", "c": "boom"}
    assert outcome.lost == ()


def test_different_errors_need_three():
    round_ = make(1)
    for number, replica in enumerate("abc"):
        assert claim(round_, replica, 0) == ("i0", number)
        assert not round_.over(0)
        round_.fail(replica, "i0", f"error {replica}", 0)
    assert round_.over(0)
    assert "failed on a, b, c: error c" in round_.outcome(0).missing["i0"]


def test_a_replica_tries_again_only_when_nobody_else_is_there():
    round_ = make(1)
    claim(round_, "a", 0)
    round_.fail("a", "i0", "the store is busy", 1)
    assert round_.claim("a", 1) is WAIT  # others may show up within a heartbeat
    assert claim(round_, "a", 3.1) == ("i0", 1)
    assert round_.finish("a", "i0", "A", 4)


def test_it_leaves_its_failure_to_a_living_other():
    round_ = make(2)
    claim(round_, "a", 0)
    claim(round_, "b", 0)
    round_.fail("a", "i0", "boom", 1)
    keep_alive(round_, "b", 1, 10, progress=0)
    assert round_.claim("a", 10) is WAIT
    assert claim(round_, "a", 14.1) == ("i0", 1)  # nobody else is left


def test_alone_the_same_error_twice_is_enough():
    round_ = make(1)
    claim(round_, "a", 0)
    round_.fail("a", "i0", "boom", 0)
    claim(round_, "a", 3)
    round_.fail("a", "i0", "boom", 3)
    assert round_.over(3)
    assert round_.outcome(3).missing == {"i0": "failed on a: boom"}


def test_a_failure_after_another_ones_result_changes_nothing():
    round_ = make(1)
    claim(round_, "a", 0)
    claim(round_, "b", 3)
    round_.finish("b", "i0", "B", 4)
    round_.fail("a", "i0", "boom", 5)
    outcome = round_.outcome(5)
    assert outcome.complete
    assert outcome.errors == {"a": "boom"}


def test_the_failure_of_a_lost_owner_leaves_the_new_one_alone():
    round_ = make(1)
    claim(round_, "a", 0)
    claim(round_, "b", 3)
    round_.fail("a", "i0", "boom", 3.5)
    assert round_.beat("b", 4)
    assert round_.claim("c", 4) is WAIT
    assert round_.finish("b", "i0", "B", 5)


def test_a_result_of_a_failed_owner_does_not_count_twice_but_a_late_one_does():
    round_ = make(1)
    claim(round_, "a", 0)
    round_.fail("a", "i0", "boom", 1)
    assert round_.finish("a", "i0", "after all", 2)
    assert round_.outcome(2).complete


def test_all_dead_expires_and_names_them():
    round_ = make(2)
    claim(round_, "a", 0)
    claim(round_, "b", 0)
    round_.finish("a", "i0", "A", 1)
    assert not round_.over(50)
    outcome = round_.outcome(DEADLINE)
    assert outcome.expired
    assert outcome.finished == {"i0": "A"}
    assert outcome.missing == {"i1": "b was lost with it"}
    assert outcome.silent == ("a", "b")
    assert outcome.lost == ("b",)


def test_a_newcomer_takes_over_when_all_are_dead():
    round_ = make(1)
    claim(round_, "a", 0)
    assert claim(round_, "respawned", 30) == ("i0", 1)
    assert round_.finish("respawned", "i0", 1, 31)
    assert round_.outcome(31).complete


def test_nothing_counts_after_the_deadline():
    round_ = make(1)
    claim(round_, "a", 0)
    assert keep_alive(round_, "a", 1, DEADLINE - 1)
    assert not round_.beat("a", DEADLINE)
    assert not round_.finish("a", "i0", "A", DEADLINE)
    assert round_.claim("a", DEADLINE) is None
    outcome = round_.outcome(DEADLINE)
    assert list(outcome.missing) == ["i0"]
    assert outcome.expired


def test_a_busy_owner_at_the_deadline_is_not_called_lost():
    round_ = make(1, startup_s=DEADLINE)
    claim(round_, "a", 0)
    keep_alive(round_, "a", 1, DEADLINE - 1)
    outcome = round_.outcome(DEADLINE)
    assert outcome.missing == {"i0": "a was still at work"}
    assert outcome.lost == ()


def test_start_up_may_take_long_but_not_for_ever():
    round_ = make(1, startup_s=30)
    claim(round_, "a", 0)
    assert keep_alive(round_, "a", 1, 29.5, progress=0)
    assert round_.claim("b", 30) is WAIT
    keep_alive(round_, "a", 30, 31, progress=0)
    assert claim(round_, "b", 31) == ("i0", 1)
    assert round_.outcome(31).lost == ("a",)
    assert round_.outcome(31).silent == ()


def test_progress_that_stands_still_counts_as_stalled_though_it_beats():
    round_ = make(1)
    claim(round_, "a", 0)
    for batch, now in enumerate([5.0, 6.0, 7.0], start=1):  # 5 s of loading, then 1 s a batch
        assert round_.beat("a", now, batch)
    keep_alive(round_, "a", 7.5, 10, progress=3, step=0.5)
    assert round_.claim("b", 10) is WAIT  # 3 x 1 s
    keep_alive(round_, "a", 10.2, 10.2, progress=3)
    assert claim(round_, "b", 10.3) == ("i0", 1)


def test_fast_batches_still_get_a_whole_heartbeat():
    round_ = make(1)
    claim(round_, "a", 0)
    for batch in range(1, 5):
        round_.beat("a", 1 + batch / 100, batch)
    round_.beat("a", 3.0, 4)
    assert round_.claim("b", 3.03) is WAIT
    assert claim(round_, "b", 3.1) == ("i0", 1)


def test_one_batch_known_allows_three_times_the_first():
    round_ = make(1)
    claim(round_, "a", 0)
    round_.beat("a", 4.0, 1)
    keep_alive(round_, "a", 5, 16, progress=1)
    assert round_.claim("b", 16) is WAIT
    round_.beat("a", 16.5, 1)
    assert claim(round_, "b", 16.6) == ("i0", 1)


def test_the_slowest_batch_is_that_of_anybody():
    round_ = make(2)
    claim(round_, "a", 0)
    claim(round_, "b", 0)
    round_.beat("b", 1, 1)
    round_.beat("b", 11, 2)  # believed: up to 2 x 3 heartbeats
    round_.beat("a", 1, 1)
    round_.beat("a", 1.1, 2)
    keep_alive(round_, "a", 2, 30, progress=2)
    round_.beat("b", 30, 3)
    assert round_.claim("c", 30) is WAIT


def test_a_stopped_process_does_not_teach_that_batches_take_minutes():
    round_ = make(2)
    claim(round_, "a", 0)
    claim(round_, "b", 0)
    for batch in (1, 2):
        round_.beat("a", batch, batch)
        round_.beat("b", batch, batch)
    round_.beat("a", 62, 3)  # it was stopped for a minute
    keep_alive(round_, "b", 3, 62, progress=2)
    assert claim(round_, "c", 62) == ("i1", 1)


def test_progress_may_jump_when_an_attempt_resumes_from_a_checkpoint():
    round_ = make(1)
    claim(round_, "a", 0)
    round_.beat("a", 5, 50)
    round_.beat("a", 6, 51)
    keep_alive(round_, "a", 6.5, 9, progress=51, step=0.5)
    assert round_.claim("b", 9) is WAIT
    round_.beat("a", 9.1, 51)
    assert claim(round_, "b", 9.2) == ("i0", 1)


def test_an_item_that_kills_its_owners_is_given_up():
    round_ = make(2)
    now = 0.0
    claim(round_, "worker", now)  # i0
    for number in range(6):
        assert claim(round_, f"victim{number}", now) == ("i1", number)
        now += 3
        round_.beat("worker", now)
    assert round_.claim("next", now) is WAIT
    round_.finish("worker", "i0", 1, now)
    assert round_.over(now)
    assert round_.outcome(now).missing["i1"].startswith("6 owners were lost: victim0")


def test_living_owners_are_never_given_up_however_many_attempts():
    round_ = make(1)
    now = 0.0
    for number in range(6):
        claim(round_, f"r{number}", now)
        now += 3
    round_.beat("r5", now)
    assert round_.claim("next", now) is WAIT
    assert round_.finish("r5", "i0", 1, now)


def test_what_travels_between_actors_survives_pickling():
    round_ = make(1)
    first = round_.claim("a", 0)
    assert pickle.loads(pickle.dumps(first)) == first
    assert pickle.loads(pickle.dumps(round_.claim("b", 0))) is WAIT
    outcome = round_.outcome(0)
    assert pickle.loads(pickle.dumps(outcome)) == outcome


class Worker:
    """A simulated replica: works, dies, hangs for a while, or raises."""

    def __init__(self, name, rng):
        self.name, self.rng = name, rng
        self.item, self.ready, self.progress = None, 0.0, 0
        self.dead, self.asleep_until = False, 0.0

    def step(self, round_, now, calm):
        if self.dead or now < self.asleep_until:
            return
        if not calm and self.rng.random() < 0.02:
            self.dead = True
            return
        if not calm and self.rng.random() < 0.02:
            self.asleep_until = now + self.rng.uniform(1, 15)
            return
        if self.item is None:
            claim = round_.claim(self.name, now)
            if isinstance(claim, Assignment):
                self.item, self.progress = claim.item.id, 0
                self.ready = now + self.rng.uniform(0.2, 5)
        elif now >= self.ready:
            if not calm and self.rng.random() < 0.05:
                round_.fail(self.name, self.item, f"error {self.rng.random()}", now)
            else:
                round_.finish(self.name, self.item, (self.name, self.item), now)
            self.item = None
        else:
            self.progress += 1
            if not round_.beat(self.name, now, self.progress):
                self.item = None


@pytest.mark.parametrize("seed", range(60))
def test_any_history_ends_and_one_healthy_replica_is_enough(seed):
    """Random deaths, sleeps and errors; replica 0 is well. All items finish or are given up."""
    rng = random.Random(seed)
    count = rng.randrange(1, 9)
    round_ = WorkRound([Item(f"i{i}") for i in range(count)], BEAT, 400.0, 0.0)
    workers = [Worker(f"r{i}", rng) for i in range(rng.randrange(1, 9))]
    now = 0.0
    while not round_.over(now):
        for index, worker in enumerate(workers):
            worker.step(round_, now, calm=index == 0)
        now += 0.25
        assert now <= 400.25
    outcome = round_.outcome(now)
    assert not outcome.expired
    assert set(outcome.finished) | set(outcome.missing) == {f"i{i}" for i in range(count)}
    for item, (owner, worked_on) in outcome.finished.items():
        assert worked_on == item
        assert outcome.owners[item] == owner
    for reason in outcome.missing.values():
        assert reason.startswith(("failed on", "6 owners"))
    for item, before, after in outcome.takeovers:
        assert before != after
        assert item in outcome.finished or item in outcome.missing
