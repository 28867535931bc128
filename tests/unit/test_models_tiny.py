"""The tiny policy's tokenizer and configuration, and checkpoint folders."""

import os
import random
import socket
import string
from pathlib import Path

import pytest
import torch

from forge_ptq.models import checkpoint, tiny

QUESTION = "State the final answer to the following arithmetic problem: 14 - 3 + 7 ="


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.build_tokenizer()


def test_task_language_is_compact(tokenizer):
    words = [tokenizer.decode([i]) for i in tokenizer(QUESTION).input_ids]
    assert words[-7:] == ["1", "4", " - ", "3", " + ", "7", " ="]
    assert words[0] == "State "
    assert len(words) == 16
    answer = [tokenizer.decode([i]) for i in tokenizer("\n<answer>-16</answer>").input_ids]
    assert answer == ["\n<answer>", "-", "1", "6", "</answer>"]


def test_any_ascii_comes_back(tokenizer):
    rng = random.Random(0)
    alphabet = [*string.printable[:95], "\n", *tiny.PIECES]
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 40)))
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_special_tokens(tokenizer):
    ids = tokenizer("1<eos>").input_ids
    assert ids[-1] == tokenizer.eos_token_id == 2
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 1)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "1"
    assert tokenizer("é").input_ids == [tokenizer.unk_token_id]
    assert len(tokenizer) == tiny.VOCAB_SIZE


def test_saved_folder_loads_offline(tokenizer, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tiny.write_assets(tmp_path, tiny.config_dict())
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(QUESTION).input_ids == tokenizer(QUESTION).input_ids
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert 1_000_000 < sum(p.numel() for p in model.parameters()) < 3_000_000
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert module.in_features % 64 == module.out_features % 64 == 0, name


def test_hidden_size_is_checked():
    with pytest.raises(ValueError, match="hidden: 100"):
        tiny.config_dict(hidden=100)


def test_unfinished_folder_never_takes_the_name(tmp_path):
    def crash(folder):
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    target = tmp_path / "model"
    with pytest.raises(KeyboardInterrupt):
        checkpoint.write_folder(target, crash, {"fingerprint": "a"})
    assert not list(tmp_path.iterdir())
    checkpoint.write_folder(target, lambda f: (f / "x").write_text("1"), {"fingerprint": "a"})
    assert checkpoint.is_current(target, "a")
    assert not checkpoint.is_current(target, "b")
    with pytest.raises(KeyboardInterrupt):
        checkpoint.write_folder(target, crash, {"fingerprint": "b"})
    assert checkpoint.is_current(target, "a")
    checkpoint.write_folder(target, lambda f: (f / "x").write_text("2"), {"fingerprint": "b"})
    assert checkpoint.is_current(target, "b")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_leftovers_of_dead_processes_are_undone(tmp_path: Path) -> None:
    """A folder moved aside comes back; unfinished ones go, but not those of living processes."""
    host, nobody = socket.gethostname(), 2**22 + 1  # above the largest process id of Linux

    def leave(name: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "complete.json").write_text('{"fingerprint": "old"}')

    def crash(_: Path) -> None:
        raise RuntimeError("full")

    alive = f".partial-model-0123abcd-{os.getppid()}@{host}"
    elsewhere = f".partial-model-0123abcd-{nobody}@{host}-2"
    other = f".partial-model-2-0123abcd-{nobody}@{host}"
    for name in (alive, elsewhere, other):
        leave(name)
    leave(f".old-model-0123abcd-{nobody}@{host}")
    leave(f".partial-model-0123abcd-{nobody}@{host}")
    with pytest.raises(RuntimeError, match="full"):
        checkpoint.write_folder(tmp_path / "model", crash, {})
    assert {path.name for path in tmp_path.iterdir()} == {alive, elsewhere, other, "model"}
    assert checkpoint.is_current(tmp_path / "model", "old")
    leave(f".old-model-0123abcd-{nobody}@{host}")
    checkpoint.write_folder(tmp_path / "model", lambda _: None, {"fingerprint": "new"})
    assert {path.name for path in tmp_path.iterdir()} == {alive, elsewhere, other, "model"}
    assert checkpoint.is_current(tmp_path / "model", "new")


def test_a_stop_between_the_renames_keeps_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    checkpoint.write_folder(target, lambda _: None, {"fingerprint": "a"})
    rename = Path.rename

    def stop(path: Path, to: Path) -> Path:
        if path.name.startswith(".partial"):
            raise KeyboardInterrupt
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.write_folder(target, lambda _: None, {"fingerprint": "b"})
    assert checkpoint.is_current(target, "a")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_tensors_come_back(tmp_path):
    state = {"a": torch.randn(3, 4).bfloat16(), "b": torch.arange(5)}
    checkpoint.save_tensors(tmp_path, state)
    back = dict(checkpoint.iter_tensors(tmp_path))
    assert set(back) == {"a", "b"}
    assert all(torch.equal(back[k], v) and back[k].dtype == v.dtype for k, v in state.items())


def test_missing_checkpoint_says_how_to_make_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"apps\.sft\.main"):
        checkpoint.read_config(tmp_path)


def test_a_folder_that_is_not_ours_is_never_replaced(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("years of work")

    def fill(folder: Path) -> None:
        (folder / "config.json").write_text("{}")

    with pytest.raises(FileExistsError, match="theirs"):
        checkpoint.write_folder(theirs, fill, {})
    assert (theirs / "thesis.txt").read_text() == "years of work"
    checkpoint.write_folder(tmp_path / "ours", fill, {"fingerprint": "1"})
    checkpoint.write_folder(tmp_path / "ours", fill, {"fingerprint": "2"})
    assert checkpoint.is_current(tmp_path / "ours", "2")
