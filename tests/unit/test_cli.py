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


def test_check_config_looks_for_what_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from safetensors.torch import save_file

    names = [f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkvo"]
    tensors = {f"{name}.weight": torch.zeros(2, 2) for name in [*names, "lm_head"]}
    save_file({**tensors, "model.norm.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    here = [TINY, f"model={tmp_path}", "ptq.plan.overrides={'*.o_proj': bf16}"]
    assert cli.main(["check-config", *here]) == 0
    wrong = ["dataset.task=chain_sums", "ptq.plan.overrides={'*.down_proj': bf16}"]
    assert cli.main(["check-config", *here, *wrong]) == 2
    printed = capsys.readouterr().err
    assert (
        "dataset.task: reasoning-gym has no task 'chain_sums'; did you mean chain_sum?" in printed
    )
    assert "ptq.plan.overrides[*.down_proj]: matches none of the model's" in printed
    assert cli.main(["check-config", *here, "ptq.plan.overrides={'*.q_proj': bf16}"]) == 2
    assert "must share one scheme" in capsys.readouterr().err
    # Nothing is known of a checkpoint that is not here, or comes in pieces of which none is.
    assert cli.main(["check-config", TINY, "model=absent/model"]) == 0


def test_a_checkpoint_in_pieces_is_read_whole(tmp_path: Path) -> None:
    import json

    import torch
    from safetensors.torch import save_file

    from forge_ptq.config.assets import linear_names

    where: dict[str, str] = {}
    for index, layer in enumerate(("a", "b", "c")):
        file = f"part-{index}.safetensors"
        save_file(
            {f"{layer}.weight": torch.zeros(2, 3), f"{layer}.bias": torch.zeros(2)}, tmp_path / file
        )
        where |= {f"{layer}.weight": file, f"{layer}.bias": file}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert linear_names(tmp_path) == ["a", "b", "c"]


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
