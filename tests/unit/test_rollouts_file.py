"""Rollout files: what is read, what is refused by line number, how it is split."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from forge_ptq.rollouts_file import RolloutFileError, read_rollouts, split

GOOD = {"prompt_ids": [1, 2], "token_ids": [3, 4, 5], "reward": 1, "prompt": "hi"}


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "rollouts.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


def read(path: Path) -> list[Any]:
    return read_rollouts(path, vocab_size=10, max_tokens=8)


def test_good_lines(tmp_path: Path) -> None:
    first, second = read(write(tmp_path, GOOD, "", {"prompt_ids": [9], "token_ids": [0]}, ""))
    assert (first.token_ids, first.response_start, first.reward) == ([1, 2, 3, 4, 5], 2, 1.0)
    assert (second.token_ids, second.response_start, second.reward) == ([9, 0], 1, 0.0)
    assert first.group != second.group


BAD: list[tuple[Any, str]] = [
    ("{", "not JSON"),
    ([1], "expected an object, got list"),
    ({"token_ids": [1]}, "prompt_ids is missing"),
    ({**GOOD, "token_ids": []}, "token_ids is empty"),
    ({**GOOD, "token_ids": "12"}, "token_ids must be a list of integers"),
    ({**GOOD, "token_ids": [1.0]}, "token_ids must be a list of integers"),
    ({**GOOD, "token_ids": [True]}, "token_ids must be a list of integers"),
    ({**GOOD, "token_ids": [3, 10]}, "token_ids holds token 10, the model's vocabulary has 10"),
    ({**GOOD, "prompt_ids": [-1]}, "prompt_ids holds token -1"),
    ({**GOOD, "token_ids": [1] * 7}, "prompt and response have 9 tokens, the model takes 8"),
    ({**GOOD, "reward": "high"}, "reward is 'high'"),
    ({**GOOD, "reward": float("nan")}, "reward is nan, expected a finite number"),
    ({**GOOD, "reward": float("-inf")}, "reward is -inf"),
    ({**GOOD, "reward": 10**400}, "reward is too large"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_line_is_named(line: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(RolloutFileError) as caught:
        read(write(tmp_path, GOOD, line, GOOD))
    assert f"rollouts.jsonl: line 2: {message}" in str(caught.value)


def test_many_bad_lines_are_counted(tmp_path: Path) -> None:
    with pytest.raises(RolloutFileError) as caught:
        read(write(tmp_path, *["{"] * 9))
    assert str(caught.value).count(".jsonl: line ") == 5
    assert "and 4 more lines" in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file(text: str, tmp_path: Path) -> None:
    with pytest.raises(RolloutFileError, match="is empty"):
        read(write(tmp_path, text))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RolloutFileError, match="cannot be read"):
        read(tmp_path / "missing.jsonl")
    with pytest.raises(RolloutFileError, match="cannot be read"):
        read(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RolloutFileError, match="cannot be read"):
        read(tmp_path / "binary")


@pytest.mark.parametrize(("plan", "sizes"), [(True, (6, 3, 3)), (False, (9, 0, 3))])
def test_the_split_is_by_prompt_and_ignores_order(
    plan: bool, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    lines = [{"prompt_ids": [p], "token_ids": [t]} for p in range(10) for t in range(2)]
    lines += [{"prompt_ids": [p, p], "token_ids": [1]} for p in range(2)]
    rollouts = read(write(tmp_path, *lines))
    parts = split(rollouts, plan=plan)
    groups = [{rollout.group for rollout in part} for part in parts]
    assert tuple(len(group) for group in groups) == sizes
    assert len(set.union(*groups)) == 12
    assert sum(len(part) for part in parts) == len(rollouts)
    shuffled = rollouts[:]
    random.Random(0).shuffle(shuffled)
    again = split(shuffled, plan=plan)
    assert [{r.group for r in part} for part in again] == groups


def test_few_prompts_all_calibrate(tmp_path: Path) -> None:
    rollouts = read(write(tmp_path, *[{"prompt_ids": [p], "token_ids": [1]} for p in range(3)]))
    assert [len(part) for part in split(rollouts, plan=True)] == [3, 0, 0]
