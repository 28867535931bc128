"""One daemon thread that owns the engine: it builds it, steps it, and runs everything that must
happen between steps.

    loop:  calls handed in by ``call``             (admissions, flips: short)
           a slice of the first job of ``run_job`` (staging, probe scoring: long, cut into pieces)
           one engine step, if there is work

A job is a generator that yields after each small piece of work, and ``WAIT`` while it only waits
for steps to happen. While requests are being served a job gets ``job_share`` of the usual step time
per step, so live sequences are slowed a little and never stopped; on an idle engine it runs on.
A job whose future was cancelled is closed. A step that raises ends the thread: everything pending
fails with ``EngineDeadError``, then ``on_death`` is told.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from forge_ptq.engine.types import EngineDeadError, SlotStateError

log = logging.getLogger(__name__)

T = TypeVar("T")
WAIT = "wait"
Job = Generator[str | None, None, T]

MIN_SLICE_S = 0.002
IDLE_SLICE_S = 0.05


class Steppable(Protocol):
    """What the thread runs. All of it is called on the engine thread only."""

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def step(self) -> None:
        """One engine step."""
        ...

    def step_s_median(self) -> float:
        """The usual step time in seconds, 0.0 before the first."""
        ...

    def fail_all(self, error: BaseException) -> None:
        """Fail every pending request."""
        ...

    def close(self) -> None:
        """Free the engine."""
        ...


class EngineThread:
    """Runs one ``Steppable``. ``start`` blocks until it is built or has failed to be.

    ``on_death`` is called on the thread with what ended it, after everything pending was failed;
    not for ``stop``, and not for an engine that could not be built.
    """

    def __init__(
        self,
        build: Callable[[], Steppable],
        *,
        job_share: float = 0.25,
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._build = build
        self._on_death = on_death
        self._job_share = job_share
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._inbox = queue.SimpleQueue()
        self._jobs: deque[tuple[Job[Any], Future[Any]]] = deque()
        self._ready: Future[Steppable] = Future()
        self._lock = threading.Lock()
        self._dead: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="forge-engine", daemon=True)

    def start(self, timeout_s: float | None = None) -> Steppable:
        """Build the engine on the thread; raises what building raised."""
        self._thread.start()
        return self._ready.result(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether calls are still accepted."""
        return self._dead is None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether the engine died of an error, rather than being stopped."""
        return self._dead is not None and not isinstance(self._dead, EngineDeadError)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` on the engine thread between two steps."""
        future: Future[T] = Future()
        with self._lock:
            if self._dead is not None:
                future.set_exception(self._death())
            else:
                self._inbox.put((function, future))
        return future

    def run_job(self, make: Callable[[], Job[T]]) -> Future[T]:
        """Run the generator that ``make`` returns, in slices between steps.

        ``make`` itself runs at once on the thread: what it raises fails the future, so a refusal
        does not wait behind other jobs.
        """
        future: Future[T] = Future()

        def begin() -> None:
            if future.cancelled():
                return
            try:
                self._jobs.append((make(), future))
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                _fail(future, error)

        self.call(begin).add_done_callback(lambda done: _pass_failure(done, future))
        return future

    def cancel_job(self, future: Future[Any]) -> bool:
        """On the engine thread only: close the job behind ``future``. False if it is over."""
        for entry in list(self._jobs):
            if entry[1] is future:
                self._jobs.remove(entry)
                try:
                    entry[0].close()
                finally:
                    _fail(future, SlotStateError("it was discarded before it was done"))
                return True
        return False

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the thread after the current step; pending work fails with EngineDeadError."""
        with self._lock:
            if self._dead is None:
                self._inbox.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine thread did not end within {timeout_s} s")

    def _death(self) -> EngineDeadError:
        return EngineDeadError(f"the engine is dead: {self._dead!r}")

    def _main(self) -> None:
        try:
            stepper = self._build()
        except BaseException as error:  # noqa: BLE001 - handed to start()
            self._dead = error
            self._ready.set_exception(error)
            return
        self._ready.set_result(stepper)
        cause: BaseException | None = None
        try:
            self._loop(stepper)
        except BaseException as error:  # noqa: BLE001 - handed to everyone who waits
            cause = error
        try:
            self._bury(stepper, cause or EngineDeadError("stopped"))
        finally:
            try:
                if cause is not None and self._on_death is not None:
                    self._on_death(cause)
            finally:
                stepper.close()

    def _loop(self, stepper: Steppable) -> None:
        while True:
            idle = not self._jobs and not stepper.has_work()
            if not self._run_calls(block=idle):
                return
            waiting = self._run_jobs(stepper)
            if stepper.has_work():
                stepper.step()
            elif waiting:
                time.sleep(MIN_SLICE_S)

    def _run_calls(self, *, block: bool) -> bool:
        """Run what is in the inbox; False when asked to stop."""
        while True:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if item is None:
                return False
            block = False
            function, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                future.set_exception(error)

    def _run_jobs(self, stepper: Steppable) -> bool:
        """Advance jobs for one slice, in turn; True if all of them only wait."""
        if not self._jobs:
            return False
        started = time.perf_counter()
        slice_s = IDLE_SLICE_S
        if stepper.has_work():
            slice_s = max(MIN_SLICE_S, self._job_share * stepper.step_s_median())
        waiting = 0
        while waiting < len(self._jobs) and time.perf_counter() - started < slice_s:
            job, future = self._jobs[0]
            if future.cancelled():
                self._jobs.popleft()
                job.close()
                continue
            try:
                waiting = waiting + 1 if next(job) == WAIT else 0
                self._jobs.rotate(-1)
            except StopIteration as end:
                self._jobs.popleft()
                if _claim(future):
                    future.set_result(end.value)
            except Exception as error:  # noqa: BLE001 - handed to the caller
                self._jobs.popleft()
                _fail(future, error)
        return waiting > 0 and waiting == len(self._jobs)

    def _bury(self, stepper: Steppable, cause: BaseException) -> None:
        """Fail everything that waits; a clean-up that raises does not spare the others."""
        with self._lock:
            self._dead = cause
        error = self._death()
        for job, future in self._jobs:
            try:
                job.close()
            except Exception:
                log.exception("closing a job of the dead engine")
            _fail(future, error)
        self._jobs.clear()
        try:
            stepper.fail_all(error)
        except Exception:
            log.exception("failing the requests of the dead engine")
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
            if item is not None:
                _fail(item[1], error)


def begun(job: Job[T]) -> Job[T]:
    """Run a job to its first yield, so that closing it always runs its ``finally``."""
    next(job)
    return job


def _claim(future: Future[Any]) -> bool:
    """Whether the future still waits; from then on it can no longer be cancelled."""
    return not future.done() and future.set_running_or_notify_cancel()


def _fail(future: Future[Any], error: BaseException) -> None:
    """Fail a future unless it is over or cancelled."""
    if _claim(future):
        future.set_exception(error)


def _pass_failure(done: Future[Any], target: Future[Any]) -> None:
    error = done.exception()
    if error is not None:
        _fail(target, error)
