"""What vLLM sees of the slots: the quantization method ``forge_slots``, its linears and heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.parameter import ModelWeightParameter

from forge_ptq.engine.plugin import QUANTIZATION
from forge_ptq.engine.slots import SlotBank, slots_of


class SlotLinear(LinearMethodBase):
    """Linear method: loads like vLLM's unquantized one, then runs whichever slot is active."""

    def __init__(self, bank: SlotBank) -> None:
        self.bank = bank

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register ``weight`` for the checkpoint loader; it is given to slot 0 afterwards."""
        if input_size != input_size_per_partition or output_size != sum(output_partition_sizes):
            raise RuntimeError("forge_slots: tensor parallelism is not supported yet, use 1")
        if params_dtype != torch.bfloat16:
            raise RuntimeError(f"forge_slots: dtype must be bfloat16, got {params_dtype}")
        weight = ModelWeightParameter(
            data=torch.empty(output_size, input_size, dtype=params_dtype),
            input_dim=1,
            output_dim=0,
            weight_loader=extra_weight_attrs["weight_loader"],
        )
        layer.register_parameter("weight", weight)
        layer.forge_part_rows = list(output_partition_sizes)  # type: ignore[assignment]
        layer.forge_in_features = input_size  # type: ignore[assignment]
        layer.forge_slots = [None, None]  # type: ignore[assignment]

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Slot 0 = the checkpoint's weight in bf16."""
        weight: torch.Tensor = layer.weight.data  # type: ignore[assignment]
        slots_of(layer)[0] = self.bank.kernels_for(weight.device).bf16(weight)
        empty = torch.empty(0, dtype=weight.dtype, device=weight.device)
        layer.weight = Parameter(empty, requires_grad=False)

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [..., K] -> [..., N] with the active slot's weights."""
        return layer.forge_slots[self.bank.active].apply(x, bias)  # type: ignore[index,union-attr]


class SlotHead(UnquantizedEmbeddingMethod):
    """Embedding tables and lm_head: the table by rebinding, the head's GEMM prepared per slot."""

    def __init__(self, bank: SlotBank) -> None:
        self.bank = bank

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Prepare lm_head for slot 0; embedding tables need nothing."""
        if isinstance(layer, ParallelLMHead):
            weight: torch.Tensor = layer.weight.data  # type: ignore[assignment]
            prepared = self.bank.kernels_for(weight.device).bf16(weight)
            layer.forge_slots = [prepared, None]  # type: ignore[assignment]

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states [..., H] -> logits [..., padded V] under the active slot."""
        return layer.forge_slots[self.bank.active].apply(x, bias)  # type: ignore[index,union-attr]


class SlotConfig(QuantizationConfig):
    """``quantization="forge_slots"``: reads plain bf16 checkpoints, needs no config of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = SlotBank()

    def get_name(self) -> str:  # type: ignore[override]
        return QUANTIZATION

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SlotConfig:
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Slots for linears, embeddings and lm_head; attention keeps vLLM's own handling."""
        if isinstance(layer, LinearBase):
            return SlotLinear(self.bank)
        if isinstance(layer, VocabParallelEmbedding):
            return SlotHead(self.bank)
        return None
