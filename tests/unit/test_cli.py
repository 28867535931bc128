"""The forge-ptq command."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_ptq import cli

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "configs" / "tiny_cpu.yaml")


def test_check_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-config", TINY]) == 0
    assert capsys.readouterr().out.strip().endswith("good")
    assert cli.main(["check-config", TINY, "seed=5", "--print"]) == 0
    assert "seed: 5" in capsys.readouterr().out


def test_check_config_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-config", TINY, "group_sise=5", "seed=-1"]) == 2
    printed = capsys.readouterr()
    assert "did you mean group_size?" in printed.err
    assert "seed: got -1" in printed.err
    assert not printed.out


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config-table"]) == 0
    assert "`ptq.guard.max_perplexity_rise`" in capsys.readouterr().out
    assert cli.main(["metrics-table"]) == 0
    assert "`ptq/publish/accepted`" in capsys.readouterr().out


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["fly"])
    assert caught.value.code == 2
    assert "check-config" in capsys.readouterr().err
