"""The whole command on a small random policy: what a run leaves behind, and that it gates."""

import json
import re

import pytest
import yaml

from tests.loop import Run, make_policy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture(scope="module")
def asynchronous(policy, tmp_path_factory):
    """A run of 8 steps whose candidate of version 5 has corrupt scales."""
    settings = ("trainer.training.steps=8", "debug.inject=[{step: 5, fault: corrupt_scales}]")
    with Run(policy, tmp_path_factory.mktemp("outputs"), "asynchronous", *settings) as run:
        code, output = run.finish()
        assert code == 0, output
        yield run, output


def test_summary_has_what_the_readme_promises(asynchronous):
    run, _ = asynchronous
    summary = run.summary()
    assert summary["status"] == "completed"
    assert summary["steps"] == 8
    assert summary["accepted"] + summary["demoted"] >= 3
    for key in ("reward_first10", "reward_last10", "tokens_per_s", "wall_s", "first_rollout_s"):
        assert summary[key] is not None, key
    for record in summary["publishes"]:
        assert {"version", "verdict", "perplexity_rise", "kl", "stage_s", "pause_s", "bytes"} <= (
            record.keys()
        )


def test_corrupt_candidate_is_refused_and_never_serves(asynchronous):
    """The demoted one after it does."""
    run, _ = asynchronous
    summary = run.summary()
    by_version = {p["version"]: p for p in summary["publishes"]}
    fifth = by_version[5]
    assert (fifth["verdict"], fifth["refused"], fifth["attempts"]) == ("demoted", True, 2), fifth
    assert fifth["refused_rise"] > 0.03 > fifth["perplexity_rise"]
    arrows = [t for p in summary["publishes"] for t in p["transitions"]]
    (refused,) = (t for t in fifth["transitions"] if t["to"] == "refused")
    assert refused["numbers"]["perplexity_rise"] == pytest.approx(fifth["refused_rise"])
    assert refused["numbers"]["low"] > 0.03, "even the interval's lower end"
    committed = {t["artifact_id"]: t["version"] for t in arrows if t["to"] == "committed"}
    assert refused["artifact_id"] not in committed
    assert committed[fifth["artifact_id"]] == 5
    assert by_version[4]["verdict"] == "accepted"
    assert by_version[6]["verdict"] == "demoted", "recover_after is 5"
    assert summary["refused"] >= 1


def test_files_of_a_run(asynchronous):
    run, output = asynchronous
    assert (run.folder / "summary.png").stat().st_size > 10_000
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert config["trainer"]["training"]["steps"] == 8
    assert list(run.folder.glob("wandb/offline-run-*/run-*.wandb"))
    logs = {path.name for path in (run.folder / "logs").iterdir()}
    assert {"policy.log", "trainer.log", "client.log"} <= logs
    assert "WARNING" not in output, "third-party logs belong into files"
    assert re.search(r"step 8/8", output)


def test_scales_are_made_once_and_again_when_there_are_rollouts(asynchronous):
    run, _ = asynchronous
    summary = run.summary()
    made = [p for p in summary["publishes"] if p["calibrated"]]
    assert made[0]["calibration_reason"] == "first"
    assert all(p["calibration_reason"].startswith(("more", "drift")) for p in made[1:])
    assert summary["calibrations"] == len(made) <= 3
    for record in summary["publishes"]:
        if record["verdict"] == "accepted":
            assert set(record["flop_share"]) == {"int8_static", "int8_dynamic", "bf16"}
            assert 1 <= record["calibration_round"] <= len(made)
            assert record["drift_clipped_fraction"] is not None


def test_light_actors_share_a_process(asynchronous):
    run, _ = asynchronous
    pids = json.loads((run.folder / "pids.json").read_text())
    light = {pids[name][0] for name in ("dataset", "rewards", "coordinator", "replay_buffer")}
    assert len(light) == 1
    heavy = ("policy", "trainer", "ref_model", "quantizer", "stats_merger")
    assert len({pids[name][0] for name in heavy}) == 5


def test_synchronous_run(policy, tmp_path):
    settings = ("trainer.training.steps=3", "off_by_n=0")
    with Run(policy, tmp_path, "synchronous", *settings) as run:
        code, output = run.finish()
        summary = run.summary()
    assert code == 0, output
    assert summary["steps"] == 3
    for age in ("policy_age_mean", "policy_age_max"):
        assert all(record[age] == 0 for record in summary["history"])
