"""Recording, merging and handing over metrics, without processes."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest

from forge_ptq.runtime.own import metrics, tracer
from forge_ptq.runtime.own.metrics import (
    Accumulator,
    Metric,
    MetricCollector,
    Reduce,
    record_metric,
    reduce_states,
)


@pytest.mark.parametrize("reduction", list(Reduce))
def test_merging_equals_reducing_all_values_together(reduction: Reduce) -> None:
    rng = np.random.default_rng(1)
    parts = [rng.normal(1e6, 0.1, size=n) for n in (1, 50, 7)]  # a sum of squares would cancel
    merged = Accumulator(reduction.value)
    for part in parts:
        accumulator = Accumulator(reduction.value)
        for value in part:
            accumulator.add(value)
        merged.merge(accumulator)
    merged.merge(Accumulator(reduction.value))  # a process that recorded nothing
    expected = getattr(np, reduction.value)(np.concatenate(parts))
    assert merged.value() == pytest.approx(expected, rel=1e-6)


def test_one_key_has_one_reduction() -> None:
    collector = MetricCollector()
    collector.push(Metric("loss", 1.0, Reduce.MEAN))
    with pytest.raises(ValueError, match="'loss'"):
        collector.push(Metric("loss", 1.0, Reduce.SUM))
    with pytest.raises(ValueError, match="'loss'"):
        reduce_states([{"loss": Accumulator("mean", 1)}, {"loss": Accumulator("sum", 1)}])


def test_a_lost_hand_over_is_neither_dropped_nor_counted_twice() -> None:
    collector = MetricCollector()
    collector.push(Metric("n", 1.0, Reduce.SUM))
    first = copy.deepcopy(collector.collect(acknowledged=0))
    collector.push(Metric("n", 10.0, Reduce.SUM))
    collector.collect(acknowledged=first["number"])  # its answer gets lost
    collector.push(Metric("n", 100.0, Reduce.SUM))
    third = copy.deepcopy(collector.collect(acknowledged=first["number"]))
    fourth = collector.collect(acknowledged=third["number"])
    totals = [reduce_states([b["states"]]).get("n", 0.0) for b in (first, third, fourth)]
    assert totals == [1.0, 110.0, 0.0]


def test_raw_samples_are_kept_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_RAW_SAMPLES", 3)
    collector = MetricCollector()
    collector.push(Metric("x", 1.0, Reduce.MEAN))
    batch = collector.collect(0, keep_raw=True)
    assert batch["raw"] == []
    for value in range(5):
        collector.push(Metric("x", float(value), Reduce.MEAN))
    batch = collector.collect(batch["number"], keep_raw=True)
    assert [metric.value for metric in batch["raw"]] == [2.0, 3.0, 4.0]


def test_recording_from_many_threads_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "COLLECTOR", MetricCollector())

    def work() -> None:
        for _ in range(500):
            record_metric("n", 1, Reduce.SUM)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reduce_states([metrics.COLLECTOR.collect(0)["states"]]) == {"n": 4000.0}


def test_what_is_not_a_number_is_refused_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "COLLECTOR", MetricCollector())
    with pytest.raises(TypeError, match=r"'loss'.*list"):
        record_metric("loss", [1.0])
    record_metric("loss", np.float32(2.0))
    monkeypatch.setenv("FORGE_DISABLE_METRICS", "true")
    record_metric("loss", 4.0)
    assert reduce_states([metrics.COLLECTOR.collect(0)["states"]]) == {"loss": 2.0}


def test_tracer_records_durations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "COLLECTOR", MetricCollector())
    clock = iter([0.0, 1.0, 3.0, 7.0, 7.5])
    monkeypatch.setattr(tracer.time, "perf_counter", lambda: next(clock))
    trace = tracer.Tracer("t")
    with pytest.raises(RuntimeError, match="before start"):
        trace.step("a")
    trace.start()
    trace.step("a")
    trace.step("a")
    trace.step("b")
    trace.stop()
    assert reduce_states([metrics.COLLECTOR.collect(0)["states"]]) == {
        "t/a/duration_avg_s": 1.5,
        "t/a/duration_max_s": 2.0,
        "t/b/duration_avg_s": 4.0,
        "t/b/duration_max_s": 4.0,
        "t/total_duration_avg_s": 7.5,
        "t/total_duration_max_s": 7.5,
    }
