"""The gradients of one step: micro-batches, their losses, and what these add up to over ranks."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge_ptq.loss import LossOutput

from . import distributed, packing, titan

Batch = dict[str, Any]
Loss = Callable[..., Any]


def response_logits(
    built: titan.BuiltModel, tokens: Tensor, prompt_lens: Tensor, response_len: int
) -> Tensor:
    """[B, R, V] logits that score each response token.

    `tokens` [B, request_len + R] is padded on the left, `prompt_lens` [B] counts prompt tokens.
    The output head runs on response positions only, where it is not sharded by tensor parallelism.
    """
    request_len = tokens.shape[1] - response_len
    packed = packing.pack(tokens, prompt_lens, request_len)
    if packed.shape[1] > built.seq_len:
        raise ValueError(
            f"training.seq_len: {built.seq_len}; this batch has sequences of {packed.shape[1]}"
        )
    index = packing.response_index(prompt_lens, response_len)
    if built.parallel_dims is not None and built.parallel_dims.tp > 1:
        logits = built.model(packed)
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        return packing.take(logits, index)

    def only_responses(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (packing.take(args[0], index),)

    head: Any = built.model.lm_head
    hook = head.register_forward_pre_hook(only_responses)
    try:
        return built.model(packed)
    finally:
        hook.remove()


@dataclass(frozen=True)
class Gradients:
    """What a step came to; the gradients themselves are in the parameters."""

    loss: float
    """Over all ranks, as are `sums` and `maxima`."""
    sums: dict[str, float]
    maxima: dict[str, float]
    rows: Tensor | None
    """[B, len(mismatch.COLUMNS)] of this rank's sequences; None where the loss makes none."""


def backward(
    built: titan.BuiltModel, loss: Loss, inputs: Batch, targets: Batch, micro_batch: int
) -> Gradients:
    """Adds the gradients of this rank's share of a batch, `micro_batch` sequences at a time.

    A loss with a `weight` divides by a count that a correction may lower (tokens that it leaves
    out), which is known once all micro-batches of all ranks have run. So they divide by the count
    of all response tokens, and loss and gradients are scaled in the end; every gradient in the
    model must be of this step.
    """
    device = titan.device_type()
    inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    targets = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in targets.items()}
    tokens, targets = packing.trim(inputs["tokens"], targets)
    response_len = targets["response"].shape[1]
    prompt_lens = inputs.get("prompt_lens")
    if prompt_lens is None:
        request_len = tokens.shape[1] - response_len
        prompt_lens = packing.prompt_lengths(tokens, request_len, built.pad_id)
    weigh = getattr(loss, "weight", None)
    takes = None if weigh else _keywords(loss)
    share = weigh(targets["padding_mask"]) if weigh else float(len(tokens))
    sum_over_ranks = partial(distributed.sum_over_ranks, copies=built.copies)
    denominator = max(sum_over_ranks({"share": share})["share"], 1.0)

    totals: dict[str, float] = defaultdict(float, loss=0.0)
    sums: dict[str, float] = defaultdict(float)
    maxima: dict[str, float] = defaultdict(float)
    rows: list[Tensor] = []
    for part in _micro_batches(len(tokens), micro_batch):
        logits = response_logits(built, tokens[part], prompt_lens[part], response_len)
        kwargs = {k: v[part] if isinstance(v, Tensor) else v for k, v in targets.items()}
        if weigh:
            output = loss(logits, **kwargs, denominator=denominator)
        else:
            of_step = (part.stop - part.start) / denominator
            output = _plain_loss(loss, takes, logits, kwargs, of_step)
        output.loss.backward()
        totals["loss"] += float(output.loss.detach())
        if output.denominator is not None:
            totals["counted"] += float(output.denominator)
        if output.rows is not None:
            rows.append(output.rows)
        for name, value in output.sums.items():
            sums[name] += float(value)
        for name, value in output.maxima.items():
            maxima[name] = max(maxima[name], float(value))

    totals = sum_over_ranks(dict(totals))
    scale = denominator / max(totals.get("counted", denominator), 1.0)
    if scale != 1.0:
        for parameter in built.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
    return Gradients(
        loss=totals["loss"] * scale,
        sums=sum_over_ranks(dict(sums)),
        maxima=distributed.max_over_ranks(dict(maxima)),
        rows=torch.cat(rows) if rows else None,
    )


def _micro_batches(batch: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, batch)) for i in range(0, batch, size))


def _keywords(loss: Loss) -> set[str] | None:
    """Names that a function takes; None if it takes any."""
    parameters = inspect.signature(loss).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return set(parameters)


def _plain_loss(
    loss: Loss, takes: set[str] | None, logits: Tensor, targets: Batch, share: float
) -> LossOutput:
    """A loss in torchforge's form, a function that returns the mean over its batch."""
    kept = {k: v for k, v in targets.items() if takes is None or k in takes}
    result = loss(logits, **kept)
    if isinstance(result, LossOutput):
        return result._replace(loss=result.loss * share, denominator=None)
    tokens = targets["padding_mask"].sum().float()
    return LossOutput(result * share, {"tokens": tokens}, {})
