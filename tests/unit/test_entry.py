"""The command before a run begins: what it refuses, with which exit code and which words."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from apps.grpo_ptq import entry
from forge_ptq.config import ConfigError
from forge_ptq.observe.run_dir import create_run_dir

REPO = Path(__file__).resolve().parents[2]
TINY = str(REPO / "configs" / "tiny_cpu.yaml")


async def never(cfg: object, report: object) -> None:
    raise AssertionError("the run must not begin")


def test_bad_configuration_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run_app(never, "", ["--config", TINY, "group_sise=4"]) == entry.BAD_CONFIG
    assert "did you mean group_size" in capsys.readouterr().err


def test_file_that_is_not_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    binary = tmp_path / "c.yaml"
    binary.write_bytes(b"\x00\xc4\xff")
    assert entry.run_app(never, "", ["--config", str(binary)]) == entry.BAD_CONFIG
    assert "c.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["models/absent", "/absent", "absent/", "./absent"])
def test_model_that_is_not_there(model: str) -> None:
    with pytest.raises(ConfigError, match="no checkpoint folder"):
        entry.require_model(model)


def test_model_on_the_hub_is_left_to_the_hub() -> None:
    entry.require_model("Qwen/Qwen3-1.7B")


def test_a_run_folder_has_one_user(tmp_path: Path) -> None:
    run_dir = create_run_dir(tmp_path, "r", "x.yaml")
    first = entry.claim(run_dir)
    with pytest.raises(OSError, match="r is running"):
        entry.claim(run_dir)
    first.close()
    entry.claim(run_dir).close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_during_imports_is_quiet(number: int) -> None:
    command = [sys.executable, "-m", "apps.grpo_ptq.main", "--config", TINY, "model=/absent"]
    process = subprocess.Popen(
        command,
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    end = time.monotonic() + 20
    # The handlers are in place once the kernel lists SIGINT among the caught signals of a process
    # that has loaded torch, the first heavy import after them.
    while time.monotonic() < end and process.poll() is None:
        if "libtorch" in Path(f"/proc/{process.pid}/maps").read_text():
            break
        time.sleep(0.01)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == entry.INTERRUPTED, output
    assert "Traceback" not in output
