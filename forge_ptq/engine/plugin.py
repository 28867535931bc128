"""Entry point of group ``vllm.general_plugins``: vLLM calls it once in every process it starts."""

from __future__ import annotations

QUANTIZATION = "forge_slots"


def register() -> None:
    """Make ``quantization="forge_slots"`` known to vLLM. Calling it again changes nothing."""
    from vllm.model_executor.layers.quantization import (
        _CUSTOMIZED_METHOD_TO_QUANT_CONFIG,
        register_quantization_config,
    )

    if QUANTIZATION in _CUSTOMIZED_METHOD_TO_QUANT_CONFIG:
        return
    from vllm.model_executor.layers.linear import (
        WEIGHT_LOADER_V2_SUPPORTED,
        register_weight_loader_v2_supported_method,
    )

    from forge_ptq.engine.methods import SlotConfig, SlotLinear

    if SlotLinear.__name__ not in WEIGHT_LOADER_V2_SUPPORTED:
        register_weight_loader_v2_supported_method(SlotLinear)
    register_quantization_config(QUANTIZATION)(SlotConfig)
