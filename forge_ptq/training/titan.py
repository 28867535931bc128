"""torchtitan models from Hugging Face checkpoint folders, on CPU as on GPU.

torchtitan builds a model from a tree of config objects and keeps sizes per published flavor. Here
the sizes come from the checkpoint's config.json, so any Qwen3 or Llama checkpoint can be trained:

    dist_env.init(...)                               # the process group, if there is more than one
    built = build(folder, seq_len=..., dtype=...)    # config -> model -> parallelize -> weights
    logits = built.model(tokens)                     # [B, L, vocab]
    built.hf_state()                                 # HF name -> Tensor or DTensor

**Attention** is SDPA with a plain causal mask: flex and varlen need a GPU to train. That is enough
because sequences are packed to the left (`packing.py`), so padding is on the right of every real
token and a causal mask never lets a real token see it.

**q, k, v stay separate** (torchtitan's default fuses them): checkpoint and HF names then map one to
one, and no state-dict hook has to gather and split shards.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from forge_ptq.config.titan import (
    ActivationCheckpointConfig,
    CompileConfig,
    ParallelismConfig,
)
from forge_ptq.models import checkpoint

from .titan_config import model_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_type() -> str:
    """ "cuda" where a GPU can be used, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def use_cpu_if_alone() -> None:
    """Tells torchtitan to run on CPU where there is no GPU: it takes CUDA for granted."""
    if torch.cuda.is_available():
        return
    from torchtitan.tools import utils

    utils.device_type = "cpu"
    utils.device_module = torch.cpu
    # Modules that copied the name at import time.
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and getattr(module, "device_type", None) == "cuda":
            module.device_type = "cpu"  # type: ignore[attr-defined]


@dataclass
class BuiltModel:
    """A torchtitan model with what is needed to feed it and to name its weights."""

    model: nn.Module
    config: dict[str, Any]
    """The checkpoint's config.json."""
    adapter: Any
    """torchtitan's state_dict_adapter of the family."""
    parallel_dims: Any = None
    """torchtitan's ParallelDims, or None for a plain single-process model."""
    seq_len: int = 0
    _placements: dict[str, Any] = field(default_factory=dict)

    @property
    def pad_id(self) -> int | None:
        """Padding token of the checkpoint."""
        pad = self.config.get("pad_token_id")
        return pad if pad is not None else self.config.get("eos_token_id")

    @property
    def dp_rank(self) -> int:
        """Which share of the data this process trains on."""
        if self.parallel_dims is None or self.parallel_dims.world_size == 1:
            return 0
        mesh = self.parallel_dims.get_optional_mesh("batch")
        return 0 if mesh is None else mesh.get_local_rank()

    @property
    def dp_size(self) -> int:
        """Number of data-parallel shares."""
        dims = self.parallel_dims
        return 1 if dims is None else dims.dp_replicate * dims.dp_shard

    @property
    def copies(self) -> int:
        """Ranks that train on one and the same share, as those of tensor parallelism do."""
        dims = self.parallel_dims
        return 1 if dims is None else dims.world_size // self.dp_size

    def hf_state(self) -> dict[str, Tensor]:
        """Weights under Hugging Face names, as they are stored (DTensors where sharded).

        A tied lm_head appears once, as model.embed_tokens.weight. Plain tensors share memory with
        the model: copy them before the next optimizer step if they must not change.
        """
        own = {k: _single_rank(v.detach()) for k, v in self.model.state_dict().items()}
        return self.adapter.to_hf({k: self._movable(k, v) for k, v in own.items()})

    def _movable(self, name: str, tensor: Tensor) -> Tensor:
        """Gathers q and k of Llama: their rows are permuted per head, and shards may cut heads."""
        if not isinstance(tensor, DTensor) or self.config["model_type"] != "llama":
            return tensor
        if not name.endswith(("wq.weight", "wk.weight")):
            return tensor
        mesh = tensor.device_mesh
        return tensor.redistribute(mesh, [Replicate()] * mesh.ndim)

    @torch.no_grad()
    def load(self, folder: str | Path) -> None:
        """Loads a HF checkpoint folder's weights; every rank reads the files and keeps its shards.

        Raises ValueError naming missing, unknown or misshapen tensors.
        """
        titan = self.adapter.from_hf(dict(checkpoint.iter_tensors(folder)))
        own = self.model.state_dict()
        missing = sorted(set(own) - set(titan))
        unknown = sorted(set(titan) - set(own))
        if missing or unknown:
            raise ValueError(f"{folder}: missing {missing[:5]}, unknown {unknown[:5]}")
        for name, target in own.items():
            value = titan[name]
            if value.shape != target.shape:
                raise ValueError(
                    f"{folder}: {name} is {tuple(value.shape)}; expected {tuple(target.shape)}"
                )
            value = value.to(target.dtype)
            if isinstance(target, DTensor):
                value = distribute_tensor(
                    value.to(target.device),
                    target.device_mesh,
                    target.placements,
                    src_data_rank=None,  # every rank has the whole tensor: nothing to send
                )
            target.copy_(value)


def _single_rank(tensor: Tensor) -> Tensor:
    """The plain tensor of a DTensor that lives on one rank."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.size() == 1:
        return tensor.to_local()
    return tensor


def build(
    folder: str | Path,
    *,
    seq_len: int,
    dtype: str = "float32",
    mixed_precision_param: str | None = None,
    parallelism: ParallelismConfig | None = None,
    activation_checkpoint: ActivationCheckpointConfig | None = None,
    compile_config: CompileConfig | None = None,
    world_size: int = 1,
    load_weights: bool = True,
    seed: int = 0,
) -> BuiltModel:
    """The checkpoint's model, parallelized over the current process group, with its weights.

    `parallelism` None makes a plain module without DTensors; otherwise torchtitan's own
    `parallelize_fn` applies tensor parallelism, FSDP2, activation checkpointing and compilation.
    `load_weights` False initializes from `seed` instead (pretraining). Raises ValueError naming the
    config.json key that is not supported.
    """
    use_cpu_if_alone()
    hf = checkpoint.read_config(folder)
    spec, config = model_config(hf, seq_len=seq_len)
    use_cpu_if_alone()  # importing the family imported more of torchtitan
    if parallelism is not None:
        model, dims = _parallel(
            spec,
            config,
            parallelism,
            seq_len=seq_len,
            dtype=dtype,
            mixed_precision_param=mixed_precision_param or dtype,
            activation_checkpoint=activation_checkpoint,
            compile_config=compile_config,
            world_size=world_size,
        )
    else:
        with torch.device("meta"):
            model, dims = config.build().to(DTYPES[dtype]), None
    model.to_empty(device=device_type())
    torch.manual_seed(seed)
    with torch.no_grad(), warnings.catch_warnings():
        # One rank draws the same numbers as a plain tensor would.
        warnings.filterwarnings("ignore", message="DTensor random operators may not")
        init_states: Any = model.init_states
        init_states(buffer_device=None)
    built = BuiltModel(model, hf, spec.state_dict_adapter(config, None), dims, seq_len)
    if load_weights:
        built.load(folder)
    return built


def _parallel(
    spec: Any,
    config: Any,
    parallelism: ParallelismConfig,
    *,
    seq_len: int,
    dtype: str,
    mixed_precision_param: str,
    activation_checkpoint: ActivationCheckpointConfig | None,
    compile_config: CompileConfig | None,
    world_size: int,
) -> tuple[nn.Module, Any]:
    """Builds on the meta device and hands over to torchtitan's parallelize_fn."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.config import CompileConfig as TitanCompile
    from torchtitan.config import DebugConfig, TrainingConfig
    from torchtitan.config import ParallelismConfig as TitanParallelism
    from torchtitan.distributed import ParallelDims

    degrees = parallelism.to_dict()
    degrees.pop("disable_loss_parallel")  # logits are always gathered here
    titan_parallelism = TitanParallelism(spmd_backend="partial_dtensor", **degrees)
    for key in ("pipeline_parallel_degree", "context_parallel_degree", "expert_parallel_degree"):
        if degrees[key] != 1:
            raise ValueError(f"parallelism.{key}: {degrees[key]}; expected 1")
    dims = ParallelDims.from_config(titan_parallelism, world_size)
    training = TrainingConfig(
        seq_len=seq_len,
        dtype=dtype,
        mixed_precision_param=mixed_precision_param,
    )
    titan_compile = TitanCompile(enable=bool(compile_config and compile_config.enable))
    config.update_from_config(
        config=SimpleNamespace(
            training=training,
            parallelism=titan_parallelism,
            debug=DebugConfig(),
            compile=titan_compile,
        )
    )
    with torch.device("meta"):
        model = config.build().to(DTYPES[dtype])
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=titan_parallelism,
        compile_config=titan_compile,
        ac_config=_recompute(activation_checkpoint),
        dump_folder="",
    )
    if device_type() == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # gloo cannot scale while it sums.
                module.set_force_sum_reduction_for_comms(True)
    return model, dims


def _recompute(config: ActivationCheckpointConfig | None) -> Any:
    """torchtitan's activation checkpointing config, or None."""
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    if config is None or config.mode == "none":
        return None
    if config.mode == "selective":
        if config.selective_ac_option != "op":
            raise ValueError(
                f"activation_checkpoint.selective_ac_option: {config.selective_ac_option!r}; "
                "expected 'op', the only policy of torchtitan 0.3"
            )
        return SelectiveAC.Config()
    return FullAC.Config()
