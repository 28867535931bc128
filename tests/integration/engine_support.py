"""Tiny checkpoints and artifacts, and one engine thread, for the tests of forge_ptq.engine."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from forge_ptq.artifact import QuantizedArtifact
from forge_ptq.engine.build import set_environment
from forge_ptq.numerics.plan import QuantPlan
from forge_ptq.numerics.schemes import get_scheme

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
set_environment()

DEADLINE_S = 60.0
VOCAB = 500  # not a multiple of 64: the vocabulary is padded inside vLLM


def save_qwen3(directory: Path, *, tied: bool, seed: int = 0, **sizes: int) -> Path:
    """A random Qwen3 with awkward sizes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 72,
        "intermediate_size": 152,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,
    }
    config = Qwen3Config(**(settings | sizes))
    model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16)
    randomize(model)
    model.save_pretrained(directory)
    return directory


def save_qwen2(directory: Path, *, seed: int = 0) -> Path:
    """A random Qwen2 with tied embeddings and biases on q, k and v."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=120,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.15,
    )
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16)
    randomize(model)
    model.save_pretrained(directory)
    return directory


def save_llama(directory: Path, *, seed: int = 0) -> Path:
    """A random Llama with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.15,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    randomize(model)
    model.save_pretrained(directory)
    return directory


def randomize(model: torch.nn.Module) -> None:
    """Give norms and biases values that a wrong slot would betray."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.rand_like(parameter) - 0.5)
            elif name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)


def hf_state(directory: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors."""
    from safetensors.torch import load_file

    return load_file(str(directory / "model.safetensors"))


def changed(state: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Another version: every tensor differs, embeddings, norms and biases too."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            tensor.float() * (1 + 0.3 * torch.randn(tensor.shape, generator=generator).clamp(-2, 2))
        ).to(torch.bfloat16)
        for name, tensor in state.items()
    }


def artifact_of(
    state: dict[str, torch.Tensor],
    version: int,
    *,
    default: str = "int8_dynamic",
    overrides: dict[str, str] | None = None,
    absmax: float = 8.0,
) -> QuantizedArtifact:
    """Quantize a bf16 state dict by a plan; every static layer gets the same absmax."""
    linears = [name.removesuffix(".weight") for name in state if name.endswith("_proj.weight")]
    layers = QuantPlan.from_config(default, overrides or {}).resolve(linears)
    tensors = {n: t.clone() for n, t in state.items() if n.removesuffix(".weight") not in layers}
    for name, scheme in layers.items():
        parts = get_scheme(scheme).quantize(state[f"{name}.weight"], name=name, absmax=absmax)
        tensors |= {f"{name}.{kind}": tensor for kind, tensor in parts.items()}
    return QuantizedArtifact.build(
        policy_version=version, model="test", layers=layers, tensors=tensors
    )


MIXED = {
    "*.q_proj": "int8_static",
    "*.k_proj": "int8_static",
    "*.v_proj": "int8_static",
    "*.down_proj": "bf16",
}


class Harness:
    """A SlotEngine on its thread, driven synchronously."""

    def __init__(self, model: Path, **engine_args: Any) -> None:
        from forge_ptq.engine.build import build_engine
        from forge_ptq.engine.core import SlotEngine
        from forge_ptq.engine.thread import EngineThread

        args = {
            "model": str(model),
            "max_model_len": 256,
            "max_num_seqs": 32,
            "kv_cache_memory_bytes": 64 << 20,
            **engine_args,
        }
        self.thread = EngineThread(lambda: SlotEngine(build_engine(args)))
        core = self.thread.start(120.0)
        assert isinstance(core, SlotEngine)
        self.core = core

    def do(self, function: Any) -> Any:
        """Run on the engine thread, wait for the result."""
        return self.thread.call(function).result(DEADLINE_S)

    def params(self, **kwargs: Any) -> Any:
        """Sampling params of one sequence."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        defaults = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        return SamplingParams(
            logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY, **{**defaults, **kwargs}
        )

    def start(self, prompts: list[list[int]], **kwargs: Any) -> list[Future[Any]]:
        """Admit all prompts between the same two steps."""
        params = self.params(**kwargs)

        def submit() -> list[Future[Any]]:
            return [self.core.submit(prompt, [params])[0][1] for prompt in prompts]

        return list(self.do(submit))

    def generate(self, prompts: list[list[int]], **kwargs: Any) -> list[Any]:
        """Admit all prompts and wait for their samples."""
        return [future.result(DEADLINE_S) for future in self.start(prompts, **kwargs)]

    def candidate(self, artifact: QuantizedArtifact) -> Any:
        """An artifact checked against the model, ready to be staged once."""
        from forge_ptq.engine.staging import Candidate

        plan = self.core.bank.layout.plan(artifact)
        return Candidate(artifact.manifest.artifact_id, artifact.manifest.policy_version, plan)

    def stage_future(
        self,
        artifact: QuantizedArtifact,
        drain_deadline_s: float = 30.0,
        *,
        companion: bool = False,
    ) -> Any:
        """Begin to stage; returns the future of the report."""
        candidate = self.candidate(artifact)
        begin = self.core.accompany if companion else self.core.stage
        return self.thread.run_job(lambda: begin(candidate, drain_deadline_s))

    def stage(self, artifact: QuantizedArtifact, drain_deadline_s: float = 30.0) -> Any:
        """Stage and wait for the report."""
        return self.stage_future(artifact, drain_deadline_s).result(DEADLINE_S)

    def accompany(self, artifact: QuantizedArtifact, drain_deadline_s: float = 30.0) -> Any:
        """Stage a companion and wait for the report."""
        return self.stage_future(artifact, drain_deadline_s, companion=True).result(DEADLINE_S)

    def admit(self, mode: str, **config: Any) -> None:
        """Change which arm new prompts go to; "companion" sends them all there."""
        from forge_ptq.engine.admission import Admission

        if mode == "companion":
            mode, config = "load", {"bf16_below": 10**6, "int8_above": 10**7}
        self.core.admission = Admission.from_config({"mode": mode, **config})

    def commit(self, artifact: QuantizedArtifact) -> Any:
        """Flip to a staged artifact."""
        return self.do(lambda: self.core.commit(artifact.manifest.artifact_id))

    def publish(self, artifact: QuantizedArtifact) -> Any:
        """Stage and commit."""
        self.stage(artifact)
        return self.commit(artifact)

    def probe(self, sequences: list[Any]) -> list[Any]:
        """Score under the idle slot."""
        return list(self.thread.run_job(lambda: self.core.probe(sequences)).result(DEADLINE_S))


def prompts(count: int, *, length: int = 21, seed: int = 0) -> list[list[int]]:
    """Random prompts of different lengths, with a common prefix."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
    return [
        common + torch.randint(0, VOCAB, (3 + i % 7,), generator=generator).tolist()
        for i in range(count)
    ]


def tokens_of(samples: list[Any]) -> list[tuple[list[int], list[float]]]:
    """What must be equal bit for bit."""
    return [(sample.token_ids, sample.logprobs) for sample in samples]
