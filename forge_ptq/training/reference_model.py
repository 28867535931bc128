"""`ReferenceModel`: the frozen starting policy, for the KL term of the loss."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forge_ptq.config.titan import (
    CheckpointConfig,
    CompileConfig,
    ModelConfig,
    ParallelismConfig,
    TrainingConfig,
)
from forge_ptq.runtime import ForgeActor, Reduce, endpoint, record_metric

from .trainer import block


@dataclass
class ReferenceModel(ForgeActor):
    """Scores sequences under fixed weights; torchforge's constructor blocks and endpoint.

    ref = await ReferenceModel.options(num_replicas=1).as_service(**cfg.ref_model)
    logprobs = await ref.forward.route(input_ids, max_req_tokens, return_logprobs=True)
    """

    model: Any
    parallelism: Any = field(default_factory=dict)
    checkpoint: Any = field(default_factory=dict)
    compile: Any = field(default_factory=dict)
    training: Any = field(default_factory=dict)
    temperature: float = 1.0
    """Divides the logits, as sampling did."""

    def __post_init__(self) -> None:
        super().__init__()
        self.model = block(ModelConfig, self.model, "ref_model.model")
        self.parallelism = block(ParallelismConfig, self.parallelism, "ref_model.parallelism")
        self.checkpoint = block(CheckpointConfig, self.checkpoint, "ref_model.checkpoint")
        self.compile = block(CompileConfig, self.compile, "ref_model.compile")
        self.training = block(TrainingConfig, self.training, "ref_model.training")

    @endpoint
    async def setup(self) -> None:
        """Builds the frozen model. One process needs no process group and no DTensors."""
        from forge_ptq.models.checkpoint import local_folder

        from . import distributed, titan

        if self._size > 1:
            distributed.init_process_group(self._rank, self._size)
        source = self.checkpoint.initial_load_path or self.model.hf_assets_path
        self._built = titan.build(
            local_folder(source),
            seq_len=self.training.seq_len,
            dtype=self.training.dtype,
            mixed_precision_param=self.training.mixed_precision_param,
            parallelism=self.parallelism if self._size > 1 else None,
            compile_config=self.compile,
            world_size=self._size,
        )
        self._built.model.eval().requires_grad_(False)

    @endpoint
    async def forward(
        self,
        input_ids: Tensor,
        max_req_tokens: int,
        return_logprobs: bool = True,
        prompt_lens: Tensor | None = None,
    ) -> Tensor:
        """Scores the response part of left-padded sequences.

        Args:
            input_ids: [B, max_req_tokens + R] int64, prompts padded on the left, responses right.
            max_req_tokens: width of the prompt part.
            return_logprobs: False returns the logits.
            prompt_lens: [B] real tokens of each prompt; without it the leading run of the
                checkpoint's padding token is taken for padding.

        Returns:
            [B, R] fp32 log-probabilities of the response tokens at `temperature` (padding's mean
            nothing), or [B, R, V] fp32 logits at the positions that predict them.
        """
        from forge_ptq.loss import token_logprobs

        from . import packing, titan
        from .backward import response_logits

        started = time.perf_counter()
        tokens = input_ids.to(titan.device_type())
        response_len = tokens.shape[1] - max_req_tokens
        if prompt_lens is None:
            prompt_lens = packing.prompt_lengths(tokens, max_req_tokens, self._built.pad_id)
        lens = prompt_lens.to(tokens.device)
        with torch.no_grad():  # not inference_mode: FSDP's hooks do not support it
            logits = response_logits(self._built, tokens, lens, response_len).float()
            response = tokens[:, max_req_tokens:]
            result = (
                token_logprobs(logits, response, self.temperature) if return_logprobs else logits
            )
        record_metric("reference_perf/forward/count_forward_passes", 1, Reduce.SUM)
        record_metric("reference_perf/forward/avg_sequence_length", input_ids.shape[1], Reduce.MEAN)
        record_metric("reference_perf/forward/seconds", time.perf_counter() - started, Reduce.MEAN)
        return result.cpu()
