"""The module tree of a HF checkpoint, without its weights."""

from __future__ import annotations

import os

import torch
from torch import nn


def build_model(model_path: str | os.PathLike[str], dtype: str = "auto") -> nn.Module:
    """The architecture of a HF checkpoint, weights not set.

    It lives on this process' GPU if it was given one (CUDA_VISIBLE_DEVICES, which the runtime sets
    for with_gpus), else on the CPU.

    dtype: a floating torch dtype, or "auto": bfloat16 on a GPU, float32 on a CPU. A copy of bf16
    weights in float32 is the same policy to the last code, its scores carry no rounding noise of
    their own, and a CPU without bf16 instructions runs it several times faster.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    given = os.environ.get("CUDA_VISIBLE_DEVICES") and torch.cuda.is_available()
    device = "cuda" if given else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise ValueError(f"dtype: expected auto or a torch dtype like bfloat16, got {dtype!r}")
    config = AutoConfig.from_pretrained(str(model_path))
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype)
    model.tie_weights()  # skipped together with the initialization
    return model.to(device).eval().requires_grad_(False)
