"""What the tests of forge-ptq's offline commands share: a tiny model and rollouts of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forge_ptq import cli
from tests.models import tiny_model

PROMPTS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(0)
    path = tmp_path_factory.mktemp("data") / "rollouts.jsonl"
    with path.open("w") as file:
        for index in range(PROMPTS):
            ids = torch.randint(0, 64, (5 + index % 4 + 9,), generator=generator).tolist()
            file.write(json.dumps({"prompt_ids": ids[:-9], "token_ids": ids[-9:]}) + "\n")
    return path


def quantize(model: Path, data: Path, out: Path, *options: str) -> int:
    asked = ["--model", str(model), "--data", str(data), "--out", str(out)]
    return cli.main(["quantize", *asked, *options])
