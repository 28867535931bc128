"""How much of the mismatch comes from the bf16 that weights are pushed in?

Usage: python -m apps.bench.push_rounding outputs/RUN [--out docs/results/push_rounding.json]

Takes the last checkpoint of a run (fp32 weights, AdamW's moments), samples responses to questions
of its task from the weights as the generator gets them, rounded to bf16, and compares in fp32, over
the whole vocabulary and as k3 of the sampled tokens:

rounding   the fp32 weights against their rounding: what a generator without any lag or quantization
           is off by
one_step   the fp32 weights against those one optimizer step before: what a lag of one version costs
unmoved    share of the weights whose bf16 is still that of the run's starting policy
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from apps.bench.options import write
from apps.grpo_ptq.evaluate import ask, weights_of
from apps.grpo_ptq.sampling import respond
from forge_ptq.config import RunConfig, load_config
from forge_ptq.models.checkpoint import iter_tensors
from forge_ptq.numerics.divergence import kl_from_logprobs
from forge_ptq.training import checkpoints
from forge_ptq.training.titan import build

State = dict[str, torch.Tensor]


def weights(cfg: RunConfig, folder: Path, hf: Path) -> tuple[State, State]:
    """(fp32 weights, the last step's change of them) of the newest checkpoint, under HF names."""
    step = max(checkpoints.complete_steps(folder))
    built = build(hf, seq_len=cfg.trainer.training.seq_len, dtype="float32")
    own = {name: tensor.detach() for name, tensor in built.model.state_dict().items()}
    named = [name for name, _ in built.model.named_parameters()]
    moments = {
        name: {m: torch.zeros_like(own[name]) for m in ("exp_avg", "exp_avg_sq")} for name in named
    }
    saved = {"model": own, "optimizer": {"state": moments}}
    dcp.load(saved, storage_reader=dcp.FileSystemReader(checkpoints.path_of(folder, step)))
    rule = cfg.trainer.optimizer

    def change(moment: Mapping[str, torch.Tensor]) -> torch.Tensor:
        mean = moment["exp_avg"] / (1 - rule.beta1**step)
        square = moment["exp_avg_sq"] / (1 - rule.beta2**step)
        return -rule.lr * mean / (square.sqrt() + rule.eps)

    changes = {name: change(moments[name]) for name in named}
    return built.adapter.to_hf(own), built.adapter.to_hf(changes)


@torch.inference_mode()
def logprobs(
    model: Any, prompts: Sequence[list[int]], responses: Sequence[list[int]], temperature: float
) -> list[torch.Tensor]:
    """[R, V] of every response."""
    found = []
    for prompt, response in zip(prompts, responses, strict=True):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        found.append((logits / temperature).log_softmax(-1))
    return found


def apart(
    sampler: Sequence[torch.Tensor],
    trainer: Sequence[torch.Tensor],
    responses: Sequence[list[int]],
) -> dict[str, float]:
    """{"kl", "k3"} of the trainer from the sampler, nats per token."""
    kl, k3 = [], []
    for gen_RV, own_RV, response in zip(sampler, trainer, responses, strict=True):
        kl.append(kl_from_logprobs(gen_RV, own_RV))
        gap_R = (own_RV - gen_RV).gather(-1, torch.tensor(response)[:, None])[:, 0]
        k3.append(gap_R.exp() - gap_R - 1)
    return {"kl": float(torch.cat(kl).mean()), "k3": float(torch.cat(k3).mean())}


def main(arguments: list[str] | None = None) -> None:
    """Parse options, measure, write."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("run", type=Path, help="folder of a run that has completed")
    options.add_argument("--out", type=Path, default=Path("docs/results/push_rounding.json"))
    options.add_argument("--prompts", type=int, default=96)
    options.add_argument("--seed", type=int, default=5)
    options.add_argument("--threads", type=int, default=1)
    parsed = options.parse_args(arguments)
    torch.set_num_threads(parsed.threads)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    cfg = load_config(parsed.run / "config.yaml")
    hf = weights_of(cfg, parsed.run)
    exact, changes = weights(cfg, hf.parent, hf)
    tokenizer = AutoTokenizer.from_pretrained(hf)
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    rounded = {name: tensor.bfloat16().float() for name, tensor in exact.items()}
    prompts = [ids for _, ids in ask(cfg, tokenizer, parsed.prompts, parsed.seed)]
    temperature = cfg.loss.temperature
    torch.manual_seed(parsed.seed)
    model.load_state_dict(rounded, strict=False)
    responses = respond(model, tokenizer, prompts, cfg.max_res_tokens, temperature)
    found = []
    before = {name: tensor - changes[name] for name, tensor in exact.items() if name in changes}
    for state in (rounded, exact, {**exact, **before}):
        model.load_state_dict(state, strict=False)  # a tied lm_head is there once
        found.append(logprobs(model, prompts, responses, temperature))
    start = dict(iter_tensors(Path(cfg.model)))
    same = sum(int((rounded[n] == start[n].float()).sum()) for n in rounded)
    results = {
        "steps": max(checkpoints.complete_steps(hf.parent)),
        "learning_rate": cfg.trainer.optimizer.lr,
        "tokens": sum(map(len, responses)),
        "rounding": apart(found[0], found[1], responses),
        "one_step": apart(found[2], found[1], responses),
        "unmoved": same / sum(tensor.numel() for tensor in rounded.values()),
    }
    parsed.run = parsed.run.name
    write(parsed, results)


if __name__ == "__main__":
    main()
