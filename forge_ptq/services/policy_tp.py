"""A policy copy sharded over the tensor-parallel ranks of one replica.

    model = build_model(path)
    shard(model, ranks=2)              # on every rank, torch.distributed being up
    policy = PolicyCopy(model, plan)   # used as ever; all ranks make the same calls in one order

Linears become DTensors by torch's own styles: q, k, v, gate and up are cut by output features
(their input is the same on every rank), o and down by input features (every rank has its slice of
the input, and outputs are summed). Attention works on whole heads: HF's modules count heads with
``view(..., -1, head_dim)``, and norms of q and k act within one head. Embeddings, norms and lm_head
stay whole on every rank.

So each weight is accessed through three functions that also take plain tensors: ``full`` (in
policy_quantize) gathers it, ``assign`` writes this rank's part of it, and ``linear_part`` says
which part that is. Statistics are partial: ``observing`` makes an observer that accounts for
``channel_slice(C, rank, ranks)`` of every site, whether this rank holds all of its channels or
just those. Each channel is then counted by exactly one rank, and sums over ranks are whole.

Shape suffixes: N output and K input features, C channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from forge_ptq.numerics.observer import ActivationObserver
from forge_ptq.numerics.plan import MODEL_TYPES
from forge_ptq.numerics.stats_table import channel_slice

BY_OUTPUT = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
BY_INPUT = frozenset({"o_proj", "down_proj"})


class ShardingError(ValueError):
    """A model that cannot be sharded like this; the message says what does not fit."""


@dataclass(frozen=True)
class LinearPart:
    """What this rank holds of one linear."""

    rank: int = 0
    ranks: int = 1
    by: str = ""
    """"output", "input", or "" for a linear that is whole."""

    def input_slice(self, channels: int) -> slice:
        """The channels of the whole input that reach this rank's linear."""
        if self.by != "input":
            return slice(0, channels)
        return channel_slice(channels, self.rank, self.ranks)


def check(config: Any, ranks: int) -> None:
    """ShardingError unless a HF config's heads and widths divide by ``ranks``."""
    if config.model_type not in MODEL_TYPES:
        raise ShardingError(
            f"{config.model_type}: only {', '.join(sorted(MODEL_TYPES))} can be sharded; "
            "give the quantizer procs: 1"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = getattr(config, name)
        if number % ranks:
            raise ShardingError(
                f"{name} is {number}, which {ranks} tensor-parallel ranks cannot share evenly; "
                "change the quantizer's procs"
            )


def shard(model: Any, ranks: int) -> None:
    """Shard a HF causal LM in place over the default process group, which has ``ranks`` members.

    Weights keep this rank's part of whatever they hold; no rank talks to another. One rank alone
    changes nothing. Raises ShardingError, and then has not touched the model.
    """
    if ranks == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

    check(model.config, ranks)
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.base_model.named_modules():
        if isinstance(module, nn.Linear):
            leaf = name.rpartition(".")[2]
            if leaf not in BY_OUTPUT | BY_INPUT:
                raise ShardingError(f"{name}: a linear of unknown role cannot be sharded")
            plan[name] = ColwiseParallel() if leaf in BY_OUTPUT else RowwiseParallel()
    mesh = init_device_mesh(next(model.parameters()).device.type, (ranks,))
    parallelize_module(model.base_model, mesh, plan, src_data_rank=None)
    model.requires_grad_(False)


def linear_part(weight: torch.Tensor) -> LinearPart:
    """Which part of a linear's weight this rank holds."""
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None:
        return LinearPart()
    by = "output" if weight.placements[0].is_shard(0) else "input"  # type: ignore[attr-defined]
    return LinearPart(mesh.get_local_rank(), mesh.size(), by)


def held(parameter: torch.Tensor) -> tuple[slice, ...] | None:
    """Which part of the whole this rank holds, a slice per dimension; None if all of it."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return None
    (placement,) = parameter.placements  # type: ignore[attr-defined]
    if not placement.is_shard():
        return None
    part = [slice(0, size) for size in parameter.shape]
    part[placement.dim] = channel_slice(
        parameter.shape[placement.dim], mesh.get_local_rank(), mesh.size()
    )
    return tuple(part)


@torch.no_grad()
def assign(parameter: torch.Tensor, value: torch.Tensor, *, part: bool = False) -> None:
    """Copy a tensor into a parameter, of which this rank may hold a part.

    value: whole; with ``part`` what ``held`` says.
    """
    where = held(parameter)
    if where is not None and not part:
        value = value[where]
    local: torch.Tensor = parameter
    if hasattr(parameter, "device_mesh"):
        local = parameter.to_local()  # type: ignore[attr-defined]
    local.copy_(value)


def observing(
    model: nn.Module, sites: Iterable[str], shift: Mapping[str, torch.Tensor] | None = None
) -> ActivationObserver:
    """An observer of this rank's channels of the sites; of all channels if nothing is sharded.

    shift: log2 smoothing factors of whole sites, int8 [C].
    """
    names = list(sites)
    weights: dict[str, Any] = {site: model.get_submodule(site).weight for site in names}
    parts = {site: linear_part(weight) for site, weight in weights.items()}
    ranks = max((part.ranks for part in parts.values()), default=1)
    if ranks == 1:
        return ActivationObserver(model, names, shift=shift)
    channels: dict[str, slice] = {}
    local_shift: dict[str, torch.Tensor] = {}
    rank = max(part.rank for part in parts.values())  # whole linears say 0
    for site in names:
        width = weights[site].shape[1]
        mine, reach = channel_slice(width, rank, ranks), parts[site].input_slice(width)
        channels[site] = slice(mine.start - reach.start, mine.stop - reach.start)
        if shift is not None and site in shift:
            local_shift[site] = shift[site][reach]
    return ActivationObserver(model, names, shift=local_shift, channels=channels)
