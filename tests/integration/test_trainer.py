"""torchtitan models against transformers; training steps, gradient accumulation, checkpoints."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_ptq.config.titan import ParallelismConfig
from forge_ptq.loss import GRPOLoss, token_logprobs
from forge_ptq.models import checkpoint
from forge_ptq.training import checkpoints, distributed, titan
from forge_ptq.training.backward import response_logits
from forge_ptq.training.engine import TrainEngine
from tests.integration.trainer_support import (
    REQUEST,
    RESPONSE,
    VOCAB,
    batch,
    config,
    save_policy,
    weights,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """kind -> checkpoint folder, made once."""
    root = tmp_path_factory.mktemp("policies")
    return {
        "qwen3_tied": save_policy(root / "a", "qwen3"),
        "qwen3_untied": save_policy(root / "b", "qwen3", tie_word_embeddings=False),
        "llama_tied": save_policy(root / "c", "llama"),
        "llama_rope": save_policy(
            root / "d", "llama", tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE
        ),
    }


def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", ["qwen3_tied", "qwen3_untied", "llama_tied", "llama_rope"])
@pytest.mark.parametrize("parallel", [False, True])
def test_logits_and_weights_equal_transformers(policies, kind, parallel):
    distributed.init_process_group(0, 1)
    folder = policies[kind]
    parallelism = ParallelismConfig() if parallel else None
    built = titan.build(folder, seq_len=64, parallelism=parallelism)
    tokens = torch.randint(VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got, expected = built.model(tokens), reference(folder)(tokens).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert float(expected.std()) > 0.1
    state, on_disk = built.hf_state(), dict(checkpoint.iter_tensors(folder))
    assert set(state) == set(on_disk)
    assert ("lm_head.weight" in state) == (kind in {"qwen3_untied", "llama_rope"})
    assert all(torch.equal(state[k], on_disk[k]) for k in on_disk)


@pytest.mark.parametrize("kind", ["qwen3_tied", "llama_tied"])
def test_left_padded_prompts_score_as_if_there_were_no_padding(policies, kind):
    built = titan.build(policies[kind], seq_len=64)
    inputs, targets = batch(size=5)
    tokens, lens = inputs["tokens"], inputs["prompt_lens"]
    with torch.no_grad():
        logits = response_logits(built, tokens, lens, RESPONSE)
        got = token_logprobs(logits, targets["response"])
        for row in range(5):
            alone = tokens[row, REQUEST - int(lens[row]) :].unsqueeze(0)
            expected = reference(policies[kind])(alone).logits[0, int(lens[row]) - 1 : -1]
            expected = token_logprobs(expected, targets["response"][row])
            mask = targets["padding_mask"][row]
            torch.testing.assert_close(got[row][mask], expected[mask], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type: 'gpt2'"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"max_position_embeddings": 32}, "seq_len: 64"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type: 'yarn'"),
    ],
)
def test_unsupported_checkpoints_are_refused(policies, tmp_path, change, message):
    hf = {**checkpoint.read_config(policies["llama_tied"]), **change}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ValueError, match=message):
        titan.build(tmp_path, seq_len=64, load_weights=False)


def test_missing_tensor_is_named(policies, tmp_path):
    state = dict(checkpoint.iter_tensors(policies["llama_tied"]))
    del state["model.norm.weight"]
    checkpoint.copy_assets(policies["llama_tied"], tmp_path)
    checkpoint.save_tensors(tmp_path, state)
    with pytest.raises(ValueError, match=r"missing \['norm\.weight'\]"):
        titan.build(tmp_path, seq_len=64)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_non_finite_step_is_skipped_and_counted(policies, where):
    class Poisoned(GRPOLoss):
        def __call__(self, *args, **kwargs):
            output = super().__call__(*args, **kwargs)
            bad = output.loss + (math.inf if where == "loss" else 0)
            if where == "gradient":
                bad.register_hook(lambda grad: grad * math.nan)
            return output._replace(loss=bad)

    engine = TrainEngine(config(policies["qwen3_tied"]), Poisoned())
    before = weights(engine)
    inputs, targets = batch()
    metrics = engine.step([inputs], [targets])
    assert (metrics["skipped"], metrics["skipped_total"], engine.step_count) == (1.0, 1.0, 1)
    assert all(torch.equal(v, before[k]) for k, v in weights(engine).items())
    engine.loss = GRPOLoss()
    assert engine.step([inputs], [targets])["skipped"] == 0.0
    assert not all(torch.equal(v, before[k]) for k, v in weights(engine).items())


def test_resumed_run_takes_the_same_next_step_bit_for_bit(policies, tmp_path):
    loss = GRPOLoss()
    engine = TrainEngine(config(policies["qwen3_tied"], tmp_path), loss)
    assert engine.resume() == 0
    for step in range(4):
        engine.extra = {"dataset_position": 10 * step}
        engine.step(*([x] for x in batch(seed=step)))
        engine.save_if_due()
    engine.extra = {"dataset_position": 31}
    engine.save()  # once more: only the state changes
    assert checkpoints.complete_steps(tmp_path) == [3, 4]  # keep_latest_k
    assert (tmp_path / "LATEST").read_text().strip() == checkpoints.path_of(tmp_path, 4).name
    resumed = TrainEngine(config(policies["qwen3_tied"], tmp_path), loss)
    assert resumed.resume() == 4
    assert resumed.extra == {"dataset_position": 31}
    a, b = (e.step(*([x] for x in batch(seed=9))) for e in (engine, resumed))
    assert {k: v for k, v in a.items() if k != "seconds"} == {
        k: v for k, v in b.items() if k != "seconds"
    }
    other = weights(resumed)
    assert all(torch.equal(v, other[k]) for k, v in weights(engine).items())


def test_last_checkpoint_is_a_hf_folder_too(policies, tmp_path):
    engine = TrainEngine(config(policies["llama_tied"], tmp_path, steps=1), GRPOLoss())
    engine.step(*([x] for x in batch()))
    engine.save_if_due()
    tokens = torch.arange(12).view(1, 12)
    engine.model.eval()
    with torch.no_grad():
        got, expected = engine.model(tokens), reference(tmp_path / "hf")(tokens).logits
    torch.testing.assert_close(got, expected, atol=0.05, rtol=0.05)  # exported in bf16


def test_a_checkpoint_is_saved_though_what_comes_beside_it_fails(policies, tmp_path):
    """The HF folder lacks what is copied into it, and a folder lies where LATEST goes."""
    (tmp_path / "LATEST").mkdir()
    engine = TrainEngine(config(policies["llama_tied"], tmp_path, steps=1), GRPOLoss())
    engine.step(*([x] for x in batch()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "assets", tmp_path / "gone")
        assert engine.save_if_due() == checkpoints.path_of(tmp_path, 1)
    assert engine.save_error == ""
    assert str(tmp_path / "hf") in engine.left_undone
    assert "IsADirectoryError" in engine.left_undone
    assert TrainEngine(config(policies["llama_tied"], tmp_path), GRPOLoss()).resume() == 1


def test_death_at_every_point_of_a_save_leaves_a_whole_checkpoint(tmp_path):
    """A child is killed with SIGKILL at the n-th file-system operation of a save, for every n."""
    script = Path(__file__).with_name("checkpoint_killer.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    killed = [r for r in results if r["status"] == -signal.SIGKILL]
    assert len(killed) > 10
    assert results[-1]["status"] == 0  # the last child got through
    for result in results:
        # The newest complete checkpoint loads and is wholly of one step; step 2 is never lost.
        assert result["step"] in {2, 3}, result
        assert result["values"] == [float(result["step"])] * 3, result
    assert {r["step"] for r in killed} == {2, 3}


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputing_activations_changes_nothing(policies, mode):
    grads = []
    for chosen in ("none", mode):
        settings = config(policies["qwen3_tied"])
        settings.activation_checkpoint.mode = chosen
        engine = TrainEngine(settings, GRPOLoss())
        grads.append(engine.step(*([x] for x in batch()))["grad_norm"])
    assert grads[0] == pytest.approx(grads[1], rel=1e-6)


@pytest.mark.parametrize(
    "precision",
    [{"dtype": "bfloat16"}, {"dtype": "float32", "mixed_precision_param": "bfloat16"}],
)
def test_bf16_trains_close_to_fp32(policies, precision):
    settings = {"mixed_precision_param": "bfloat16", **precision}
    half = TrainEngine(config(policies["qwen3_tied"], **settings), GRPOLoss())
    full = TrainEngine(config(policies["qwen3_tied"]), GRPOLoss())
    stored = {str(p.dtype).removeprefix("torch.") for p in half.model.parameters()}
    assert stored == {precision["dtype"]}
    a, b = (e.step(*([x] for x in batch())) for e in (half, full))
    assert a["skipped"] == 0
    for name in ("entropy", "grad_norm", "logprob"):
        assert a[name] == pytest.approx(b[name], rel=0.1), name
