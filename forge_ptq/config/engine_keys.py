"""Names in `policy.engine_args` and `policy.sampling_params`, with the types we check.

vLLM's EngineArgs has over 250 fields and importing it takes seconds, so a typo would show late.
These are the fields that make sense for a text policy with two weight slots, by vLLM's own names;
tests/integration/test_engine_keys.py compares them with the installed vLLM. The rest is out:
multimodal, LoRA, speculation, servers, and what the generator sets itself (SET_BY_GENERATOR).
"""

from __future__ import annotations

from typing import Any

NUMBER = (int, float)
ANY = (object,)

ENGINE_ARGS: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "tokenizer": (str,),
    "tokenizer_mode": (str,),
    "trust_remote_code": (bool,),
    "revision": (str,),
    "download_dir": (str,),
    "load_format": (str,),
    "dtype": (str,),
    "kv_cache_dtype": (str,),
    "seed": (int,),
    "max_model_len": (int,),
    "max_num_seqs": (int,),
    "max_num_batched_tokens": (int,),
    "max_logprobs": (int,),
    "block_size": (int,),
    "num_gpu_blocks_override": (int,),
    "kv_cache_memory_bytes": (int,),
    "gpu_memory_utilization": NUMBER,
    "cpu_offload_gb": NUMBER,
    "enable_prefix_caching": (bool,),
    "enable_chunked_prefill": (bool,),
    "enforce_eager": (bool,),
    "tensor_parallel_size": (int,),
    "pipeline_parallel_size": (int,),
    "data_parallel_size": (int,),
    "enable_expert_parallel": (bool,),
    "distributed_executor_backend": (str,),
    "disable_custom_all_reduce": (bool,),
    "disable_cascade_attn": (bool,),
    "disable_sliding_window": (bool,),
    "attention_backend": (str,),
    "hf_overrides": (dict,),
    "generation_config": (str,),
    "override_generation_config": (dict,),
    "compilation_config": ANY,
    "async_scheduling": (bool,),
    "disable_log_stats": (bool,),
}

SET_BY_GENERATOR: tuple[str, ...] = (
    "quantization",
    "quantization_config",
    "scheduler_cls",
    "logprobs_mode",
    "worker_cls",
)

SAMPLING_PARAMS: dict[str, tuple[type, ...]] = {
    "n": (int,),
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": (int,),
    "min_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "seed": (int,),
    "stop": (str, list),
    "stop_token_ids": (list,),
    "bad_words": (list,),
    "include_stop_str_in_output": (bool,),
    "ignore_eos": (bool,),
    "max_tokens": (int,),
    "min_tokens": (int,),
    "logprobs": (int,),
    "detokenize": (bool,),
    "skip_special_tokens": (bool,),
    "spaces_between_special_tokens": (bool,),
    "logit_bias": (dict,),
    "allowed_token_ids": (list,),
}


def has_type(value: Any, types: tuple[type, ...]) -> bool:
    """isinstance, but a bool is not a number; null stands for vLLM's default."""
    if value is None or types == ANY:
        return True
    if isinstance(value, bool):
        return bool in types
    return isinstance(value, types)


def describe(types: tuple[type, ...]) -> str:
    return "number" if types == NUMBER else " or ".join(t.__name__ for t in types)
