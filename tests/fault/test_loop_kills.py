"""One run and what can happen to it: kills of its processes and of the command, Ctrl-C, a disk that
is full for a while. It goes on, or stops with a clear message and is resumed, and in the end has
every step once."""

import os
import resource
import signal
import time

import pytest

from apps.bench.kills import check_run
from forge_ptq.observe.summary import SWAPPED
from tests.fault.matrix import record
from tests.loop import Run, make_policy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 40
SETTINGS = (f"trainer.training.steps={STEPS}", "trainer.checkpoint.interval=2")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """start(): another session of the one run of this module."""
    policy = make_policy(tmp_path_factory.mktemp("policy") / "tiny")
    outputs = tmp_path_factory.mktemp("outputs")
    return lambda: Run(policy, outputs, "run", *SETTINGS)


def test_generator_and_quantizer_come_back_and_a_dead_trainer_stops_the_run(start):
    with start() as run:
        run.wait_for_step(2)
        run.kill("policy")
        run.wait_for_step(run.step() + 3)
        run.kill("quantizer")
        quantizer_killed = run.step()
        run.wait_for_step(quantizer_killed + 3)
        pid = run.kill("trainer")
        killed = time.monotonic()
        code, output = run.finish(timeout_s=60)
        summary = run.summary()
    assert time.monotonic() - killed < 45
    assert code == 1
    assert summary["status"] == "failed"
    assert "Traceback" not in output
    assert str(pid) in output, output
    assert "TitanTrainer" in output, output
    assert "run_name=run" in output, "the message must say how to go on"
    for name in ("policy", "quantizer"):
        assert any(f"{name} died and was respawned" in e["text"] for e in summary["events"])
    swapped = [p["version"] for p in summary["publishes"] if p["verdict"] in SWAPPED]
    assert max(swapped) > quantizer_killed, "nothing quantized was served after the kills"
    check_run(run.folder)
    record("any", "trainer killed", "the run stops, names it, and is resumed", __file__)


def test_killed_while_it_starts(start):
    with start() as run:
        before = run.step()
        while len(run.family) < 6:
            assert run.running()
            time.sleep(0.05)
        run.kill("command")
        run.finish()
    assert check_run(run.folder)["steps"] == before
    record("any", "command killed", "its processes end; the run is resumed", __file__)


def test_a_full_disk_costs_checkpoints_only_and_ctrl_c_stops_in_order(start):
    with start() as run:
        before = run.step()
        run.wait_for_step(before + 1)
        processes = [run.process.pid, *run.pids("trainer")]
        full = run.step()
        for pid in processes:  # no file of these may grow beyond a kilobyte: what a full disk does
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        time.sleep(2.5)
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        for pid in processes:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
        run.wait_for_step(full + 3)
        # The terminal sends SIGINT to the whole foreground process group.
        os.killpg(run.process.pid, signal.SIGINT)
        code, output = run.finish(timeout_s=60)
        summary = run.summary()
    assert code == 130, output
    assert "Traceback" not in output
    assert summary["status"] == "interrupted"
    assert 2 <= summary["resumed_from"] <= before
    told = " ".join(event["text"] for event in summary["events"])
    assert "summary.json cannot be written" in told, told
    assert "is not saved" in told, told
    resumed = [p for p in summary["publishes"] if p["version"] > summary["resumed_from"]]
    # The artifact that served and the calibration behind it: no bf16, nothing measured anew.
    assert resumed
    assert all(p["verdict"] in SWAPPED for p in resumed), resumed
    assert not any(p["calibration_reason"] == "first" for p in resumed), resumed
    assert "serves again" in output, output
    check_run(run.folder)


def test_in_the_end_it_has_every_step_once(start):
    with start() as run:
        code, output = run.finish()
        summary = run.summary()
    assert code == 0, output
    assert "Traceback" not in output
    assert summary["status"] == "completed"
    check_run(run.folder, steps=STEPS)
