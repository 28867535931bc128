"""What does a generator lose when the trainer's fp32 weights are pushed as bf16, and why?

Usage: python -m apps.bench.push_rounding outputs/RUN [--out docs/results/push_rounding.json]

Takes the last checkpoint of a run (fp32 weights, AdamW's moments), makes of it the weights that
generators could have, lets each answer questions of the run's task, and compares it in fp32 with
the trainer's weights, over the whole vocabulary and as k3 of the sampled tokens:

nearest, stochastic            the weights in bf16, rounded in either way
int8_nearest, int8_stochastic  these with INT8 weights per channel, activations as they are
one_version_behind             fp32 weights less the last step, by AdamW's moments at the full
                               learning rate and without decay: about what a lag of one costs

unmoved is the share of the weights whose bf16 is still that of the run's starting policy.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from apps.bench.options import write
from apps.grpo_ptq.evaluate import ask, weights_of
from apps.grpo_ptq.sampling import respond
from forge_ptq.config import ConfigError, RunConfig, load_config
from forge_ptq.models.checkpoint import iter_tensors
from forge_ptq.numerics.divergence import kl_from_logprobs
from forge_ptq.numerics.rounding import stochastic_bf16
from forge_ptq.numerics.schemes import get_scheme
from forge_ptq.training import checkpoints
from forge_ptq.training.titan import build

State = dict[str, torch.Tensor]


def weights(cfg: RunConfig, folder: Path, hf: Path, step: int) -> tuple[State, State]:
    """(fp32 weights, the last step's change of them) of a checkpoint, under HF names."""
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


def int8(state: State, layers: Iterable[str]) -> State:
    """The state with the weights of these layers as INT8 makes them."""
    scheme, result = get_scheme("int8_dynamic"), dict(state)
    for layer in layers:
        weight_NK = state[f"{layer}.weight"]
        parts = scheme.quantize(weight_NK, name=layer)
        result[f"{layer}.weight"] = scheme.dequantize(parts).float()
    return result


def main(arguments: list[str] | None = None) -> None:
    """Parse options, measure, write."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("run", type=Path, help="folder of a run that has completed")
    out = Path("docs/results/push_rounding.json")
    options.add_argument("--out", type=Path, default=out, help=f"JSON of the result; {out}")
    options.add_argument("--prompts", type=int, default=96)
    options.add_argument("--seed", type=int, default=5)
    options.add_argument("--threads", type=int, default=1)
    parsed = options.parse_args(arguments)
    torch.set_num_threads(parsed.threads)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        cfg = load_config(parsed.run / "config.yaml")
        hf = weights_of(cfg, parsed.run)
    except (ConfigError, OSError) as error:
        options.error(str(error))
    step = max(checkpoints.complete_steps(hf.parent))
    exact, changes = weights(cfg, hf.parent, hf, step)
    tokenizer = AutoTokenizer.from_pretrained(hf)
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    prompts = [ids for _, ids in ask(cfg, tokenizer, parsed.prompts, parsed.seed)]
    start = dict(iter_tensors(Path(cfg.model)))
    pushed: dict[str, State] = {
        "nearest": {name: tensor.bfloat16() for name, tensor in exact.items()},
        "stochastic": {name: stochastic_bf16(tensor, name) for name, tensor in exact.items()},
    }
    results: dict[str, Any] = {"steps": step, "learning_rate": cfg.trainer.optimizer.lr}

    def compare(generator: State) -> dict[str, float]:
        model.load_state_dict(generator, strict=False)  # a tied lm_head is there once
        torch.manual_seed(parsed.seed)
        temperature = cfg.loss.temperature
        responses = respond(model, tokenizer, prompts, cfg.max_res_tokens, temperature)
        sampler = logprobs(model, prompts, responses, temperature)
        model.load_state_dict(exact, strict=False)
        trainer = logprobs(model, prompts, responses, temperature)
        return {**apart(sampler, trainer, responses), "tokens": sum(map(len, responses))}

    for how, state in pushed.items():
        same = sum(int((tensor == start[name]).sum()) for name, tensor in state.items())
        unmoved = same / sum(tensor.numel() for tensor in state.values())
        results[how] = {**compare(state), "unmoved": unmoved}
        results[f"int8_{how}"] = compare(int8(state, linear))
    before = {name: exact[name] - change for name, change in changes.items()}
    results["one_version_behind"] = compare({**exact, **before})
    parsed.run = parsed.run.name
    write(parsed, results)


if __name__ == "__main__":
    main()
