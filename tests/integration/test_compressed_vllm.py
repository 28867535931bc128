"""Stock vLLM loads and serves the checkpoints that ``forge_ptq.compressed`` writes.

What is compared: the scheme, codes and scales of every linear as vLLM holds them when its loader is
done, and greedy tokens with their logprobs against our slots serving the same artifact.

On CPUs without VNNI oneDNN's int8 GEMM, which stock vLLM uses, adds pairs of u8 x s8 products in 16
bits that saturate. Activations arrive there as 0..255, so weight codes within +-64 cannot saturate
(2 * 255 * 64 < 2**15): the artifact of this test keeps to +-63, an int8 artifact like any other,
and the kernel is checked to be right in that range on this very machine. So the comparison is bit
for bit wherever the test runs: our slots with vLLM's int8 kernel must give identical logprobs. With
the kernel that the slots choose by themselves (on CPUs without VNNI another one, rounding in
another order) a random model's greedy continuations part sooner or later, so there the first token
and its logprob are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_ptq.artifact import QuantizedArtifact
from forge_ptq.compressed import save_compressed
from forge_ptq.numerics.schemes import INT8_MAX
from tests.integration.engine_support import (
    MIXED,
    Harness,
    artifact_of,
    hf_state,
    prompts,
    save_qwen3,
    tokens_of,
)

PEAK = 63
MAX_TOKENS = 24
PLAN = {**MIXED, "model.layers.1.mlp.*": "int8_static"}
Answer = tuple[list[int], list[float]]


def small_codes(artifact: QuantizedArtifact) -> QuantizedArtifact:
    """The artifact with its int8 codes shrunk to +-PEAK and its scales widened to match."""
    tensors = dict(artifact.tensors)
    for layer, scheme in artifact.manifest.layers.items():
        if scheme != "bf16":
            codes_NK = tensors[f"{layer}.weight"].float() * (PEAK / INT8_MAX)
            tensors[f"{layer}.weight"] = codes_NK.round().to(torch.int8)
            tensors[f"{layer}.weight_scale"] = tensors[f"{layer}.weight_scale"] * (INT8_MAX / PEAK)
    manifest = artifact.manifest
    return QuantizedArtifact.build(
        policy_version=1, model=manifest.model, layers=manifest.layers, tensors=tensors
    )


class Stock:
    """vLLM without our plugin's quantization: what it loaded, and what it says."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        from vllm.model_executor.kernels.linear.scaled_mm import cpu
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        from forge_ptq.engine.build import build_stock_engine, model_runner

        self.loaded: dict[int, dict[str, torch.Tensor]] = {}

        def look_before_packing(kind: Any) -> None:
            """Kernels keep a prepacked form of the weight alone; for bf16 it depends on the CPU."""
            process = kind.process_weights_after_loading

            def record(method: Any, layer: torch.nn.Module) -> None:
                held = {n: p.detach().clone() for n, p in layer.named_parameters()}
                self.loaded[id(layer)] = held
                process(method, layer)

            patch.setattr(kind, "process_weights_after_loading", record)

        look_before_packing(cpu.CPUInt8ScaledMMLinearKernel)
        look_before_packing(UnquantizedLinearMethod)
        # With AMX vLLM would take a kernel that ignores static input scales.
        patch.setattr(cpu, "check_cpu_sgl_kernel", lambda *_: False)
        self.engine = build_stock_engine(
            {
                "model": str(folder),
                "dtype": "bfloat16",
                "enforce_eager": True,
                "max_model_len": 256,
                "kv_cache_memory_bytes": 64 << 20,
                "skip_tokenizer_init": True,
                "enable_prefix_caching": False,
                "logprobs_mode": "processed_logprobs",
            }
        )
        self.model = model_runner(self.engine).model

    def scheme(self, module: torch.nn.Module) -> str:
        """Our name for the scheme that vLLM gave a linear."""
        method = type(module.quant_method).__name__
        if method == "UnquantizedLinearMethod":
            return "bf16"
        assert method == "CompressedTensorsLinearMethod"
        assert type(module.scheme).__name__ == "CompressedTensorsW8A8Int8"
        assert module.scheme.strategy == "channel"  # type: ignore[union-attr]
        assert module.scheme.input_symmetric is True  # type: ignore[union-attr]
        static = module.scheme.is_static_input_scheme  # type: ignore[union-attr]
        return "int8_static" if static else "int8_dynamic"

    def greedy(self, asked: list[list[int]]) -> list[Answer]:
        """Tokens and logprobs of every prompt."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            max_tokens=MAX_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for index, prompt in enumerate(asked):
            self.engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        answers: dict[int, Answer] = {}
        while self.engine.has_unfinished_requests():
            outputs: list[Any] = self.engine.step()
            for output in outputs:
                if output.finished:
                    only = output.outputs[0]
                    logprobs = [next(iter(entry.values())).logprob for entry in only.logprobs]
                    answers[int(output.request_id)] = (list(only.token_ids), logprobs)
        return [answers[index] for index in range(len(asked))]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("model") / "hf", tied=False)


@pytest.fixture(scope="module")
def artifact(source: Path) -> QuantizedArtifact:
    made = artifact_of(hf_state(source), 1, default="int8_dynamic", overrides=PLAN)
    assert set(made.manifest.layers.values()) == {"int8_static", "int8_dynamic", "bf16"}
    return small_codes(made)


@pytest.fixture(scope="module")
def stock(source: Path, artifact: QuantizedArtifact, tmp_path_factory: Any) -> Any:
    folder = save_compressed(artifact, source, tmp_path_factory.mktemp("compressed"))
    with pytest.MonkeyPatch.context() as patch:
        yield Stock(folder, patch)


def test_vllm_holds_the_artifact_layer_by_layer(stock: Stock, artifact: QuantizedArtifact) -> None:
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    seen: set[str] = set()
    for name, module in stock.model.named_modules():
        parent, _, leaf = name.rpartition(".")
        members = [f"{parent}.{member}" for member in packed.get(leaf, [leaf])]
        if members[0] not in artifact.manifest.layers:
            continue
        seen |= set(members)
        assert {artifact.manifest.layers[m] for m in members} == {stock.scheme(module)}, name
        parts = stock.loaded[id(module)]
        for kind in ("weight", "weight_scale"):
            if f"{members[0]}.{kind}" in artifact.tensors:
                whole = torch.cat([artifact.tensors[f"{m}.{kind}"] for m in members])
                assert torch.equal(parts[kind], whole), f"{name}.{kind}"
        scale = artifact.tensors.get(f"{members[0]}.input_scale")
        assert ("input_scale" in parts) == (scale is not None), name
        assert scale is None or torch.equal(parts["input_scale"], scale), name
    assert seen == set(artifact.manifest.layers)
    rest = {n: t for n, t in artifact.tensors.items() if n.endswith("norm.weight")}
    state = dict(stock.model.named_parameters())
    assert rest
    assert all(torch.equal(state[name], tensor) for name, tensor in rest.items())
    head = state["lm_head.weight"]
    assert torch.equal(head[:500], artifact.tensors["lm_head.weight"])


def test_greedy_tokens_equal_our_slots(
    stock: Stock, artifact: QuantizedArtifact, source: Path
) -> None:
    from forge_ptq.engine import kernels

    class VllmInt8(kernels.Fp32Kernels):
        """vLLM's oneDNN int8 GEMM even where the slots would not choose it."""

        name = "vllm_int8"

        def int8(self, *parts: Any) -> kernels.PreparedLinear:
            return kernels.OneDnnKernels().int8(*parts)

    assert kernels.exactness(VllmInt8(), peak=PEAK) < 0.01
    asked = prompts(8)
    theirs = stock.greedy(asked)
    harness = Harness(source, enable_prefix_caching=False)
    try:
        bank = harness.core.bank
        harness.publish(artifact)
        for mine, (tokens, logprobs) in zip(
            harness.generate(asked, max_tokens=MAX_TOKENS), theirs, strict=True
        ):
            assert mine.token_ids[0] == tokens[0]
            assert mine.logprobs[0] == pytest.approx(logprobs[0], abs=0.1)
        if not isinstance(bank.kernels_for(torch.device("cpu")), kernels.OneDnnKernels):
            bank._kernels = VllmInt8()
            harness.publish(artifact)
        mine = tokens_of(harness.generate(asked, max_tokens=MAX_TOKENS))
        assert [tokens for tokens, _ in mine] == [tokens for tokens, _ in theirs]
        assert mine == theirs
    finally:
        harness.thread.stop()
