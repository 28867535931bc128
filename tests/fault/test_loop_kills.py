"""SIGKILL to the processes of a running loop: what must recover does, what must stop says why."""

import signal
import time

import pytest

from tests.loop import Run, make_policy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy") / "tiny")


def test_generator_and_quantizer_come_back(policy, tmp_path):
    with Run(policy, tmp_path, "recovers", "trainer.training.steps=12") as run:
        run.wait_for_step(3)
        run.kill("policy")
        run.wait_for_step(6)
        run.kill("quantizer")
        code, output = run.finish()
        summary = run.summary()
    assert code == 0, output
    assert summary["status"] == "completed"
    assert summary["steps"] == 12
    assert "Traceback" not in output
    served = [p["version"] for p in summary["publishes"] if p["verdict"] == "accepted"]
    assert served, summary["publishes"]
    assert max(served) > 6, "nothing was accepted after the kills"
    assert any(event["kind"] == "respawn" for event in summary["events"]), summary["events"]


def test_dead_trainer_stops_the_run_and_resumes_from_its_checkpoint(policy, tmp_path):
    settings = ("trainer.training.steps=6", "trainer.checkpoint.interval=2")
    with Run(policy, tmp_path, "resumes", *settings) as run:
        run.wait_for_step(3)
        pid = run.kill("trainer")
        killed = time.monotonic()
        code, output = run.finish(timeout_s=60)
        assert time.monotonic() - killed < 45
        assert code == 1
        assert run.summary()["status"] == "failed"
    assert "Traceback" not in output
    assert str(pid) in output, output
    assert "TitanTrainer" in output, output
    assert "run_name=resumes" in output, "the message must say how to go on"
    with Run(policy, tmp_path, "resumes", *settings) as run:
        code, output = run.finish()
        summary = run.summary()
    assert code == 0, output
    assert summary["status"] == "completed"
    assert summary["resumed_from"] in (2, 4)
    assert [record["step"] for record in summary["history"]] == [1, 2, 3, 4, 5, 6]


def test_ctrl_c_stops_in_order(policy, tmp_path):
    with Run(policy, tmp_path, "interrupted", "trainer.training.steps=1000") as run:
        run.wait_for_step(2)
        # The terminal sends SIGINT to the whole foreground process group.
        import os

        os.killpg(run.process.pid, signal.SIGINT)
        code, output = run.finish(timeout_s=60)
        summary = run.summary()
    assert code == 130, output
    assert "Traceback" not in output
    assert summary["status"] == "interrupted"
    assert summary["steps"] >= 2
