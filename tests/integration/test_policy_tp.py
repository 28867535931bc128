"""Two tensor-parallel ranks, real processes, against one process that holds everything."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from forge_ptq.models.tiny import config_dict
from forge_ptq.numerics.stats_table import Layout, unpack
from forge_ptq.services.policy_copy import build_model
from forge_ptq.services.policy_tp import ShardingError, check
from forge_ptq.services.ranks import Ranks
from tests.integration.policy_tp_worker import job, main, make_policy

RANKS = 2
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True,
    "mlp_bias": True, "hidden_size": 72, "intermediate_size": 88, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 20, "num_hidden_layers": 2, "vocab_size": 64,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
CONFIGS = {"llama": LLAMA, "qwen3": config_dict(layers=2, intermediate=264, vocab=64)}


def write_checkpoint(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """config.json and random bf16 weights, biases included; the weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, parameter in build_model(folder).named_parameters():
        spread = torch.randn(parameter.shape, generator=generator)
        centre = 1.0 if "norm" in name else 0.0
        scale = 0.2 if parameter.dim() == 1 else 2 * parameter.shape[1] ** -0.5
        weights[name] = (centre + scale * spread).to(torch.bfloat16)
    torch.save(weights, folder / "weights.pt")
    return weights


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Per architecture: (one process' results, both ranks' results)."""
    root = tmp_path_factory.mktemp("tp")
    weights = {name: write_checkpoint(root / name, config) for name, config in CONFIGS.items()}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folders = [str(root / name) for name in CONFIGS]
    context = mp.start_processes(
        main, (RANKS, port, folders), nprocs=RANKS, join=False, start_method="spawn"
    )
    assert context is not None
    single = {name: job(make_policy(root / name, weights[name], 1), Ranks()) for name in CONFIGS}
    try:
        while not context.join(timeout=120):
            pass
    finally:
        for process in context.processes:
            process.kill()
    return {
        name: (
            single[name],
            [torch.load(root / name / f"rank{r}.pt", weights_only=True) for r in range(RANKS)],
        )
        for name in CONFIGS
    }


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("which", ["raw", "smoothed"])
def test_statistics_of_the_ranks_are_those_of_one_process(results, name, which):
    single, ranks = results[name]
    layout = Layout(tuple((site, int(width)) for site, width in single["sites"]))
    tables = [rank[which] for rank in ranks]
    joined = {
        key: torch.stack([table[key] for table in tables])
        if key in ("histogram", "scalars")
        else torch.cat([table[key] for table in tables], dim=1)
        for key in tables[0]
    }
    expected = unpack(single[which], layout)
    for site, got in unpack(joined, layout).items():
        want = expected[site]
        assert (got.tokens, got.count) == (want.tokens, want.count) == (59, 59 * want.channels)
        torch.testing.assert_close(got.absmax_C, want.absmax_C, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.sum_sq_C, want.sum_sq_C, rtol=1e-4, atol=1e-4)
        # A value within rounding of an edge may fall on either side.
        moved = int((got.histogram_B - want.histogram_B).abs().sum())
        assert moved <= 2 + want.count // 500, site
        assert got.absmax > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_artifacts_are_bit_equal_on_every_rank(results, name):
    single, ranks = results[name]
    assert "int8_dynamic" in single["used"].values()
    for rank in ranks:
        assert rank["used"] == single["used"]
        assert list(rank["tensors"]) == list(single["tensors"])
        for key, tensor in single["tensors"].items():
            assert torch.equal(rank["tensors"][key], tensor), key


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_agree(results, name):
    single, ranks = results[name]
    for rank in ranks:
        for got, want in zip(rank["hidden"], single["hidden"], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        got_kl, want_kl = (torch.cat(side["kl"]).mean() for side in (rank, single))
        assert want_kl > 1e-4
        # Rounding before a step function: single codes may differ, the mean hardly.
        assert float(got_kl) == pytest.approx(float(want_kl), rel=0.05)


@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_hold_rows_or_columns_of_linears_and_the_rest_whole(results, name):
    single, ranks = results[name]
    assert single["slices"] == {}
    width, inner = CONFIGS[name]["hidden_size"], CONFIGS[name]["intermediate_size"]
    down, up = (f"model.layers.1.mlp.{leaf}_proj.weight" for leaf in ("down", "up"))
    for index, rank in enumerate(ranks):
        half = (index * inner // 2, (index + 1) * inner // 2)
        assert rank["slices"][down] == [(0, width), half]
        assert rank["slices"][up] == [half, (0, width)]
        cut = {part.rsplit(".", 2)[1] for part in rank["slices"]}
        assert cut == {f"{leaf}_proj" for leaf in ("q", "k", "v", "o", "gate", "up", "down")}


@pytest.mark.parametrize("name", CONFIGS)
def test_all_ranks_search_the_plan_of_one_process(results, name):
    single, ranks = results[name]
    schemes = list(single["plan"]["layers"].values())
    assert {"int8_static", "bf16"} <= set(schemes)  # decided by what was measured
    for rank in ranks:
        assert rank["plan"]["layers"] == single["plan"]["layers"]
        assert rank["plan"]["absmax"] == single["plan"]["absmax"]
        assert rank["plan"]["predicted_rise"] == ranks[0]["plan"]["predicted_rise"]
        rise = pytest.approx(single["plan"]["predicted_rise"], rel=0.1)
        assert rank["plan"]["predicted_rise"] == rise


def test_heads_that_do_not_divide_are_refused(tmp_path):
    from transformers import AutoConfig

    write = {"a": ("num_key_value_heads", 3), "b": ("model_type", "gemma"), "c": ("none", 0)}
    for folder, (key, value) in write.items():
        (tmp_path / folder).mkdir()
        config = {**LLAMA, "num_attention_heads": 6, "intermediate_size": 90, key: value}
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ShardingError, match="num_key_value_heads is 3"):
        check(AutoConfig.from_pretrained(str(tmp_path / "a")), 2)
    with pytest.raises(ShardingError, match=r"gemma: only llama"):
        check(AutoConfig.from_pretrained(str(tmp_path / "b")), 2)
    check(AutoConfig.from_pretrained(str(tmp_path / "c")), 2)
    with pytest.raises(ShardingError, match="num_attention_heads is 6, which 4"):
        check(AutoConfig.from_pretrained(str(tmp_path / "c")), 4)
