"""Builds the vLLM engine that the slots need, from a user's ``engine_args``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_ptq.engine.plugin import QUANTIZATION, register

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Defaults set before vLLM is imported; the first one is required."""

OWN_ARGS = ("quantization", "scheduler_cls", "logprobs_mode")


def complete_engine_args(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """``engine_args`` with what the slots require; ValueError names what contradicts them."""
    for key in OWN_ARGS:
        if key in engine_args:
            raise ValueError(f"engine_args.{key} is set by the generator, remove it")
    if engine_args.get("enforce_eager", True) is not True:
        raise ValueError(
            "engine_args.enforce_eager is False, expected True: compiled graphs remember the "
            "addresses of weights, so two slots need eager mode"
        )
    for key in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if engine_args.get(key, 1) != 1:
            raise ValueError(f"engine_args.{key} is {engine_args[key]}, the slots support 1")
    if engine_args.get("async_scheduling"):
        raise ValueError(
            "engine_args.async_scheduling is True, steps of two slots must not overlap"
        )
    if engine_args.get("dtype", "bfloat16") not in ("bfloat16", "auto"):
        raise ValueError(f"engine_args.dtype is {engine_args['dtype']!r}, expected 'bfloat16'")
    completed = {
        **engine_args,
        "dtype": "bfloat16",
        "enforce_eager": True,
        "async_scheduling": False,
        "quantization": QUANTIZATION,
        "scheduler_cls": "forge_ptq.engine.lanes.LaneScheduler",
        "logprobs_mode": "processed_logprobs",
    }
    completed.setdefault("disable_log_stats", True)
    model = Path(str(completed.get("model", "")))
    if model.is_dir() and not any((model / n).is_file() for n in _TOKENIZER_FILES):
        completed.setdefault("skip_tokenizer_init", True)
    return completed


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def set_environment() -> None:
    """Before the first vLLM import of a process: one process, no usage reports."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise RuntimeError("VLLM_ENABLE_V1_MULTIPROCESSING must be 0: the engine runs in-process")


def build_engine(engine_args: Mapping[str, Any], *, lanes: bool = True) -> LLMEngine:
    """An in-process engine with slots and lanes; slot 0 serves the checkpoint in bf16.

    ``lanes=False`` keeps vLLM's own scheduler, to measure what lanes cost.
    """
    set_environment()
    register()
    completed = complete_engine_args(engine_args)
    if not lanes:
        del completed["scheduler_cls"]
    engine = build_stock_engine(completed)
    bank = engine.vllm_config.quant_config.bank  # type: ignore[union-attr]
    bank.bind(model_runner(engine).model)
    names = checkpoint_names(Path(str(completed["model"])))
    if names:
        bank.layout.check_checkpoint(names)
    return engine


def build_stock_engine(engine_args: Mapping[str, Any]) -> LLMEngine:
    """An in-process engine with exactly these arguments, to compare with."""
    set_environment()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(EngineArgs(**engine_args))


def sample_batch(engine: LLMEngine, prompts: list[list[int]], max_tokens: int) -> int:
    """Sample every prompt to max_tokens at temperature 1 with logprobs; returns tokens made."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    for index, prompt in enumerate(prompts):
        engine.add_request(f"bench-{index}", {"prompt_token_ids": prompt}, params)
    tokens = 0
    while engine.has_unfinished_requests():
        outputs: list[Any] = engine.step()
        tokens += sum(len(o.outputs[0].token_ids) for o in outputs if o.finished)
    return tokens


def model_runner(engine: LLMEngine) -> Any:
    """vLLM's model runner of an in-process, single-worker engine."""
    return engine.model_executor.driver_worker.worker.model_runner


def checkpoint_names(directory: Path) -> set[str]:
    """Tensor names in a local safetensors checkpoint; empty where the path is not one."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    single = directory / "model.safetensors"
    if not single.is_file():
        return set()
    from safetensors import safe_open

    with safe_open(str(single), framework="pt") as file:
        return set(file.keys())
