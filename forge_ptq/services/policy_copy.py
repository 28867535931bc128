"""PolicyCopy: a module tree that holds one policy version, and the three things done with it.

It loads weights under HF names, runs rollouts through the policy (reference scores, activation
ranges) and turns its weights into the tensors of an artifact. No actors, no store: a Quantizer
process owns one, and so could a trainer rank.

Sequences are batched by length and padded on the right. Attention is causal, so no real position
sees the padding and no mask is needed; positions of padding are dropped from every result.

Shape suffixes: B sequences, T positions, R response tokens, H hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from forge_ptq.numerics.plan import QuantPlan, group_of
from forge_ptq.numerics.schemes import QuantizationError, get_scheme

BATCH_TOKENS = 4096
"""Positions per forward pass, padding included (one sequence may exceed it)."""

CORRUPTION = 3.0
"""Factor of the fault corrupt_scales on every other output channel."""


class Sequence_(Protocol):
    """What is scored: token_ids, of which those from response_start on are the response."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def response_start(self) -> int: ...


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


class PolicyCopy:
    """A policy in full precision. ``version`` is None until ``load`` has succeeded."""

    def __init__(self, model: Any, plan: QuantPlan) -> None:
        self.model = model
        self.version: int | None = None
        self.architecture = type(model).__name__
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._aliases = {
            name: parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name not in self.parameters
        }
        linears = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
        self.plan = plan
        self.layers = plan.resolve(linears)
        self.linears = linears

    @torch.no_grad()
    def load(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy a whole policy version in; ValueError naming the tensor that does not fit.

        A tied weight may come under either or both of its names, but then equal.
        """
        canonical = self._canonical(weights)
        missing = sorted(set(self.parameters) - set(canonical))
        if missing:
            raise ValueError(
                f"policy version {version}: {missing[0]} is missing ({len(missing)} tensors are)"
            )
        for name, parameter in self.parameters.items():
            if canonical[name].shape != parameter.shape:
                raise ValueError(
                    f"policy version {version}: {name} has shape {list(canonical[name].shape)}, "
                    f"{self.architecture} expects {list(parameter.shape)}"
                )
        self.version = None
        for name, parameter in self.parameters.items():
            parameter.copy_(canonical[name])
        self.version = version

    def _canonical(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weights under the model's own parameter names, tied duplicates merged."""
        by_parameter = {id(parameter): name for name, parameter in self.parameters.items()}
        found: dict[str, torch.Tensor] = {}
        for name, tensor in weights.items():
            if name in self.parameters:
                target = name
            elif name in self._aliases:
                target = by_parameter[id(self._aliases[name])]
            else:
                raise ValueError(f"{name}: {self.architecture} has no such parameter")
            if target in found and not torch.equal(found[target], tensor):
                raise ValueError(f"{name} is tied to {target}, but the two differ")
            found[target] = tensor
        return found

    @torch.no_grad()
    def reference(self, sequences: Sequence[Sequence_]) -> list[torch.Tensor]:
        """Final-normed hidden states [R, H] that predict each sequence's response tokens.

        Row i predicts token response_start + i, so it comes from position response_start + i - 1.
        """
        for index, sequence in enumerate(sequences):
            if not 1 <= sequence.response_start < len(sequence.token_ids):
                raise ValueError(
                    f"sequence {index}: response_start {sequence.response_start} must be within 1 "
                    f"and {len(sequence.token_ids) - 1}"
                )
        results: list[torch.Tensor | None] = [None] * len(sequences)
        for indices, tokens_BT, _ in self._batches(sequences):
            hidden_BTH = self._hidden(tokens_BT)
            for row, index in enumerate(indices):
                sequence = sequences[index]
                span = slice(sequence.response_start - 1, len(sequence.token_ids) - 1)
                results[index] = hidden_BTH[row, span].clone()
        return [hidden_RH for hidden_RH in results if hidden_RH is not None]

    @torch.no_grad()
    def absmax(self, sequences: Sequence[Sequence_]) -> dict[str, float]:
        """max|x| of the input of every int8_static layer over all real positions, 0 included.

        QuantizationError names a layer whose input is not finite.
        """
        ranges: dict[str, float] = {}
        valid_BT: torch.Tensor | None = None

        def watch(name: str) -> Any:
            def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
                assert valid_BT is not None
                x_BT = args[0].detach().abs().amax(-1).to(torch.float32)
                largest = float(x_BT.cpu()[valid_BT].max())
                if not largest < float("inf"):
                    raise QuantizationError(f"{name}: its calibration input holds {largest}")
                ranges[name] = max(ranges.get(name, 0.0), largest)

            return hook

        modules = dict(self.model.named_modules())
        static = [name for name, scheme in self.layers.items() if scheme == "int8_static"]
        hooks = [modules[name].register_forward_pre_hook(watch(name)) for name in static]
        try:
            for _, tokens_BT, mask_BT in self._batches(sequences):
                valid_BT = mask_BT
                self._hidden(tokens_BT)
        finally:
            for hook in hooks:
                hook.remove()
        return ranges

    def quantize(
        self, layers: Mapping[str, str], absmax: Mapping[str, float], *, corrupt: bool = False
    ) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, str]]:
        """(tensors, layers, notes) of an artifact of the loaded version.

        layers: scheme per layer that is wanted. Layers that an engine fuses share their input, so
        they share one static scale, the largest of theirs. A static layer whose input was never
        seen or always zero cannot have a scale: its whole group becomes int8_dynamic, with a note.
        """
        used, notes, ranges = self._static_ranges(layers, absmax)
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            layer, _, leaf = name.rpartition(".")
            if leaf == "weight" and layer in used:
                scheme = get_scheme(used[layer])
                parts = scheme.quantize(parameter, name=layer, absmax=ranges.get(layer))
                tensors.update({f"{layer}.{part}": tensor for part, tensor in parts.items()})
            else:
                if not bool(torch.isfinite(parameter).all()):
                    raise QuantizationError(f"{name}: holds NaN or infinite values")
                tensors[name] = parameter.detach().to(torch.bfloat16, copy=True)
        if corrupt:
            corrupt_scales(tensors)
        return tensors, used, notes

    @staticmethod
    def _static_ranges(
        layers: Mapping[str, str], absmax: Mapping[str, float]
    ) -> tuple[dict[str, str], dict[str, str], dict[str, float]]:
        used, notes, ranges = dict(layers), {}, {}
        for name, scheme in layers.items():
            if scheme != "int8_static":
                continue
            members = [member for member in group_of(name) if member in layers]
            largest = max(absmax.get(member, 0.0) for member in members)
            if largest > 0:
                ranges[name] = largest
            else:
                used[name] = "int8_dynamic"
                notes[name] = "int8_dynamic instead of int8_static: calibration saw no input"
        return used, notes, ranges

    def _hidden(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        device = next(iter(self.parameters.values())).device
        output = self.model.base_model(input_ids=tokens_BT.to(device), use_cache=False)
        return output.last_hidden_state.cpu()

    @staticmethod
    def _batches(
        sequences: Sequence[Sequence_],
    ) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
        """(indices, tokens_BT, mask_BT) in order of length; mask is True on real positions."""
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i].token_ids))
        batch: list[int] = []
        for position, index in enumerate(order):
            batch.append(index)
            last = position + 1 == len(order)
            longest_next = 0 if last else len(sequences[order[position + 1]].token_ids)
            if not last and longest_next * (len(batch) + 1) <= BATCH_TOKENS:
                continue
            longest = len(sequences[index].token_ids)
            tokens_BT = torch.zeros(len(batch), longest, dtype=torch.long)
            mask_BT = torch.zeros(len(batch), longest, dtype=torch.bool)
            for row, i in enumerate(batch):
                ids = torch.tensor(sequences[i].token_ids, dtype=torch.long)
                tokens_BT[row, : len(ids)], mask_BT[row, : len(ids)] = ids, True
            yield batch, tokens_BT, mask_BT
            batch = []


def corrupt_scales(tensors: dict[str, torch.Tensor]) -> None:
    """Injected fault: every other weight scale off by a factor, the artifact still well-formed."""
    scales = [tensor for name, tensor in tensors.items() if name.endswith(".weight_scale")]
    if not scales:
        raise ValueError("corrupt_scales needs an int8 layer, the plan has none")
    for scale_N1 in scales:
        scale_N1[::2] *= CORRUPTION
