"""The engine thread's order and failures, on a stepper that counts."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Future

import pytest

from forge_ptq.engine.stats import StepStats
from forge_ptq.engine.thread import WAIT, EngineThread, Job
from forge_ptq.engine.types import EngineDeadError, SlotStateError


class Counter:
    """Steps as long as it is told to; raises at a chosen step."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.budget = 0
        self.steps = 0
        self.fail_at = fail_at
        self.failed: BaseException | None = None
        self.closed = False
        self.thread: int | None = None

    def has_work(self) -> bool:
        return self.steps < self.budget

    def step(self) -> None:
        self.thread = threading.get_ident()
        self.steps += 1
        if self.steps == self.fail_at:
            raise ArithmeticError("step went wrong")
        time.sleep(0.001)

    def step_s_median(self) -> float:
        return 0.001

    def fail_all(self, error: BaseException) -> None:
        self.failed = error

    def close(self) -> None:
        self.closed = True


def started(stepper: Counter) -> EngineThread:
    thread = EngineThread(lambda: stepper)
    assert thread.start(10) is stepper
    return thread


def test_calls_run_on_the_engine_thread_and_hand_back_errors() -> None:
    thread = started(Counter())
    assert thread.call(threading.get_ident).result(5) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0).result(5)
    assert thread.call(lambda: 7).result(5) == 7
    thread.stop()


def test_a_job_runs_between_steps_and_never_stops_them() -> None:
    """A job of 50 pieces of 1 ms takes at most its share per step."""
    stepper = Counter()
    thread = started(stepper)
    seen: list[int] = []

    def work() -> Job[str]:
        for _ in range(50):
            time.sleep(0.001)
            seen.append(stepper.steps)
            yield None
        return "done"

    stepper.budget = 10_000
    assert thread.run_job(work).result(10) == "done"
    stepper.budget = 0
    assert len(set(seen)) >= 10, "steps must go on while the job runs"
    thread.stop()


def test_a_waiting_job_wakes_with_steps() -> None:
    stepper = Counter()
    thread = started(stepper)

    def wait_for_steps() -> Job[int]:
        while stepper.steps < 5:
            yield WAIT
        return stepper.steps

    future = thread.run_job(wait_for_steps)
    time.sleep(0.02)
    assert not future.done()
    stepper.budget = 5
    assert future.result(5) == 5
    thread.stop()


def test_a_refusal_does_not_wait_behind_another_job() -> None:
    thread = started(Counter())
    over = threading.Event()

    def long() -> Job[None]:
        while not over.is_set():
            yield WAIT

    def refuse() -> Job[None]:
        raise SlotStateError("no")

    first = thread.run_job(long)
    with pytest.raises(SlotStateError):
        thread.run_job(refuse).result(5)
    over.set()
    first.result(5)
    thread.stop()


def test_cancelling_a_job_runs_its_clean_up() -> None:
    thread = started(Counter())
    cleaned: list[bool] = []

    def forever() -> Job[None]:
        try:
            while True:
                yield WAIT
        finally:
            cleaned.append(True)

    future = thread.run_job(forever)
    time.sleep(0.02)
    assert thread.call(lambda: thread.cancel_job(future)).result(5)
    assert cleaned == [True]
    with pytest.raises(SlotStateError, match="discarded"):
        future.result(5)
    assert not thread.call(lambda: thread.cancel_job(future)).result(5)
    thread.stop()


def test_a_failing_step_fails_everything() -> None:
    """Pending requests, running jobs, queued and later calls: all get EngineDeadError."""
    stepper = Counter(fail_at=3)
    thread = started(stepper)

    def forever() -> Job[None]:
        while True:
            yield WAIT

    job = thread.run_job(forever)
    stepper.budget = 5
    with pytest.raises(EngineDeadError, match="step went wrong"):
        job.result(5)
    with pytest.raises(EngineDeadError, match="step went wrong"):
        thread.call(lambda: 1).result(5)
    with pytest.raises(EngineDeadError):
        thread.run_job(forever).result(5)
    assert isinstance(stepper.failed, EngineDeadError)
    assert stepper.closed
    assert not thread.alive


def test_a_cancelled_job_is_closed_and_the_engine_goes_on() -> None:
    thread = started(Counter())
    closed = threading.Event()

    def forever() -> Job[None]:
        try:
            while True:
                yield WAIT
        finally:
            closed.set()

    future = thread.run_job(forever)
    assert thread.call(lambda: len(thread._jobs)).result(5) == 1
    assert future.cancel()
    assert closed.wait(5)
    assert thread.call(lambda: 7).result(5) == 7
    thread.stop()


def test_a_job_cancelled_within_its_last_slice_does_no_harm() -> None:
    """Returning, raising or being discarded: the future is cancelled before it can be set."""
    thread = started(Counter())

    def returning() -> Job[str]:
        yield None
        futures[0].cancel()
        return "too late"

    def raising() -> Job[str]:
        yield None
        futures[0].cancel()
        raise ArithmeticError("too late")

    for make in (returning, raising):
        futures: list[Future[str]] = []
        ready = threading.Event()
        thread.call(ready.wait)
        futures.append(thread.run_job(make))
        ready.set()
        with pytest.raises(CancelledError):
            futures[0].result(5)
        assert thread.call(lambda: 7).result(5) == 7

    def discarded() -> bool:
        futures[0].cancel()
        return thread.cancel_job(futures[0])

    def forever() -> Job[str]:
        while True:
            yield WAIT

    futures = [thread.run_job(forever)]
    assert thread.call(discarded).result(5)
    thread.stop()


def test_a_job_cancelled_before_it_began_never_begins() -> None:
    thread = started(Counter())
    hold = threading.Event()
    begun: list[bool] = []

    def job() -> Job[None]:
        begun.append(True)
        yield None

    thread.call(hold.wait)
    future = thread.run_job(job)
    future.cancel()
    hold.set()
    thread.call(lambda: None).result(5)
    assert begun == []
    thread.stop()


def test_death_is_told_after_everything_pending_was_failed() -> None:
    """Also with a cancelled job among the pending ones, and one whose clean-up raises."""
    stepper = Counter(fail_at=1)
    told: list[tuple[BaseException, bool, BaseException | None]] = []
    over = threading.Event()

    def on_death(cause: BaseException) -> None:
        told.append((cause, jobs[1].done(), stepper.failed))
        over.set()

    def forever() -> Job[None]:
        try:
            while True:
                yield WAIT
        finally:
            raise OSError("clean-up went wrong")

    thread = EngineThread(lambda: stepper, on_death=on_death)
    thread.start(10)
    jobs: list[Future[None]] = []

    def die_next() -> None:
        jobs[0].cancel()
        stepper.budget = 1

    hold = threading.Event()
    thread.call(hold.wait)
    jobs += [thread.run_job(forever), thread.run_job(forever)]
    hold.set()
    thread.call(die_next)
    with pytest.raises(EngineDeadError):
        jobs[1].result(5)
    assert over.wait(5)
    thread.stop()
    ((cause, failed_before, requests),) = told
    assert isinstance(cause, ArithmeticError | OSError)
    assert thread.failed
    assert failed_before
    assert isinstance(requests, EngineDeadError)
    assert stepper.closed


def test_stopping_is_not_dying() -> None:
    told: list[BaseException] = []
    thread = EngineThread(Counter, on_death=told.append)
    thread.start(10)
    thread.stop()
    assert told == []
    assert not thread.failed


def test_a_dead_engine_ends_its_process_with_an_error() -> None:
    """The generator's hook: status 1, the log written."""
    code = (
        "import logging, sys; from forge_ptq.engine import leaving; logging.basicConfig();"
        "leaving.die(ArithmeticError('step went wrong'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "step went wrong" in done.stderr


def test_a_build_that_fails_is_raised_by_start() -> None:
    def build() -> Counter:
        raise FileNotFoundError("no model here")

    thread = EngineThread(build)
    with pytest.raises(FileNotFoundError, match="no model here"):
        thread.start(5)
    assert not thread.alive


def test_pause_is_the_longest_wait_of_a_lane() -> None:
    """Waits are measured per lane, from admission or the lane's last step to its next step."""
    stats = StepStats()
    stats.admitted(0, 10.0)
    stats.stepped(0, 10.1, 10.2, still_waiting=True)
    assert stats.pause_s == pytest.approx(0.1)
    stats.admitted(1, 10.2)
    stats.stepped(1, 10.2, 10.7, still_waiting=True)  # lane 0 waits meanwhile
    stats.stepped(0, 10.7, 10.8, still_waiting=False)
    assert stats.pause_s == pytest.approx(0.5)
    stats.begin_window()
    stats.admitted(0, 99.0)  # nothing waited in between
    stats.stepped(0, 99.0, 99.1, still_waiting=False)
    assert stats.pause_s == pytest.approx(0.0)
    assert stats.longest_pause_s == pytest.approx(0.5)
    assert stats.step_s_median() == pytest.approx(0.1, abs=0.01)
