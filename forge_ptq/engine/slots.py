"""Two weight slots in one vLLM model: the bank of the quantization method ``forge_slots``.

Every linear layer holds ``forge_slots = [slot 0, slot 1]``, each a ``PreparedLinear`` of its own
scheme (int8 static, int8 dynamic, bf16) or None. Every other parameter (embeddings, norms,
lm_head, biases) belongs to the slots too: vLLM's modules keep their Parameter objects, and
``SlotBank.activate`` points each ``parameter.data`` at the tensor of the slot that the coming step
runs under. Embedding and lm_head tied to one Parameter are one entry. So a step sees the tensors of
exactly one slot, and switching costs a pointer assignment per parameter, no copy.

That relies on nothing remembering addresses between steps: torch.compile and CUDA graphs do, hence
``enforce_eager`` is required. Tensor parallelism would need the same bank in every worker process;
until that exists it is refused.

    bank = vllm_config.quant_config.bank     made with the model, one per engine
    bank.bind(model)                         once, after loading: slot 0 = the checkpoint in bf16
    for _ in bank.fill(1, plan): ...         layer by layer, between steps
    bank.activate(1)                         before a step (LaneScheduler does it)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from forge_ptq.engine.kernels import LinearKernels, PreparedLinear, select_kernels
from forge_ptq.engine.layout import FillPlan, LinearSite, ModelLayout
from forge_ptq.engine.types import SlotStateError

SLOTS = (0, 1)


class SlotBank:
    """All slotted tensors of one model.

    ``active``: the slot of the step. ``live``: of new requests. ``companion``: a slot that takes
    requests beside it, from when it is filled until it is cleared.
    """

    def __init__(self) -> None:
        self.active = 0
        self.live = 0
        self.companion: int | None = None
        self.layout: ModelLayout
        self._kernels: LinearKernels | None = None
        self._heads: dict[str, nn.Module] = {}
        self._rest: list[tuple[Parameter, list[torch.Tensor | None]]] = []
        self._rest_by_name: dict[str, list[torch.Tensor | None]] = {}

    def kernels_for(self, device: torch.device) -> LinearKernels:
        """The kernels of this engine; chosen at the first call."""
        if self._kernels is None:
            self._kernels = select_kernels(device)
        return self._kernels

    @property
    def kernel_name(self) -> str:
        """Name of the kernels that run the linears."""
        return self._kernels.name if self._kernels is not None else "none"

    def bind(self, model: nn.Module) -> None:
        """List the loaded model's slotted tensors; what was loaded becomes slot 0."""
        from forge_ptq.engine.methods import SlotHead, SlotLinear

        linears: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, SlotLinear):
                linears[name] = module
            elif isinstance(method, SlotHead) and isinstance(module, ParallelLMHead):
                self._heads[f"{name}.weight"] = module
            elif isinstance(module, LinearBase):
                raise RuntimeError(f"forge_slots: {name} is a linear without slots")
        if not linears:
            raise RuntimeError("forge_slots: the model was not built with this quantization")
        self.layout = ModelLayout(model, linears)
        for name, site in self.layout.rest.items():
            slots: list[torch.Tensor | None] = [site.parameter.data, None]
            self._rest.append((site.parameter, slots))
            self._rest_by_name[name] = slots

    def activate(self, slot: int) -> None:
        """Make a filled slot the one that the next forward pass uses."""
        if slot == self.active:
            return
        for parameter, slots in self._rest:
            tensor = slots[slot]
            if tensor is None:
                raise RuntimeError(f"forge_slots: slot {slot} is not filled")
            parameter.data = tensor
        self.active = slot

    def clear(self, slot: int) -> None:
        """Free a slot that is not active."""
        if slot == self.active:
            raise RuntimeError(f"forge_slots: slot {slot} is active, it cannot be cleared")
        if slot == self.companion:
            self.companion = None
        for site in self.layout.linears.values():
            slots_of(site.module)[slot] = None
        for head in self._heads.values():
            slots_of(head)[slot] = None
        for _, slots in self._rest:
            slots[slot] = None

    def fill(self, slot: int, plan: FillPlan) -> Iterator[None]:
        """Put a checked artifact into a cleared slot, one tensor group at each ``next``.

        The plan's tensors are given away: they may be used in place and must not change later.
        """
        device = next(iter(self._rest))[0].device
        kernels = self.kernels_for(device)
        for site in self.layout.linears.values():
            parts = plan.linears.pop(site.name)
            slots_of(site.module)[slot] = _prepare(kernels, site, parts, device)
            yield
        for name, slots in self._rest_by_name.items():
            parameter = self.layout.rest[name].parameter
            slots[slot] = _padded(plan.rest.pop(name), parameter, device)
            yield
        for name, head in self._heads.items():
            source = self._rest_by_name[self.layout.tied.get(name, name)][slot]
            assert source is not None
            slots_of(head)[slot] = kernels.bf16(source)
            yield
        self.assert_complete(slot)

    def assert_complete(self, slot: int) -> None:
        """Raise unless every slotted tensor of the model is present in the slot."""
        empty = [n for n, s in self.layout.linears.items() if slots_of(s.module)[slot] is None]
        empty += [n for n, head in self._heads.items() if slots_of(head)[slot] is None]
        empty += [n for n, slots in self._rest_by_name.items() if slots[slot] is None]
        if empty:
            raise RuntimeError(f"forge_slots: slot {slot} lacks {empty[:3]} ({len(empty)} in all)")

    def head_weight(self, slot: int) -> torch.Tensor:
        """lm_head's weight [V, H] in a slot, without vocabulary padding."""
        if len(self._heads) != 1:
            raise RuntimeError(f"forge_slots: expected one lm_head, found {sorted(self._heads)}")
        name = next(iter(self._heads))
        source = self.layout.tied.get(name, name)
        weight = self._rest_by_name[source][slot]
        if weight is None:
            raise RuntimeError(f"forge_slots: slot {slot} is not filled")
        return weight[: self.layout.rest[source].parts[0].rows]

    def layer_schemes(self, slot: int) -> dict[str, str]:
        """HF module name -> scheme that its prepared linear runs."""
        prepared = {s.name: slots_of(s.module)[slot] for s in self.layout.linears.values()}
        return {
            part.name: linear.scheme
            for name, linear in prepared.items()
            if linear is not None
            for part in self.layout.linears[name].parts
        }

    def scale_weights(self, slot: int, layer: str, factor: float) -> None:
        """Debug: multiply the weight scales of one HF module in place, as a bit error would.

        SlotStateError if the slot has no INT8 layer of that name.
        """
        site = self.layout.hf_linears().get(layer)
        prepared = None if site is None else slots_of(site.module)[slot]
        if site is None or prepared is None or not prepared.scheme.startswith("int8"):
            raise SlotStateError(f"{layer}: slot {slot} has no INT8 layer of this name")
        names = [part.name for part in site.parts]
        begin = sum(part.rows for part in site.parts[: names.index(layer)])
        prepared.scale_rows(begin, begin + site.parts[names.index(layer)].rows, factor)

    def nbytes(self, slot: int) -> int:
        """Bytes that a slot keeps allocated, prepared forms included."""
        modules = [site.module for site in self.layout.linears.values()] + list(
            self._heads.values()
        )
        prepared = [slots_of(module)[slot] for module in modules]
        rest = [slots[slot] for _, slots in self._rest]
        return sum(p.nbytes for p in prepared if p is not None) + sum(
            t.numel() * t.element_size() for t in rest if t is not None
        )


def slots_of(module: nn.Module) -> list[PreparedLinear | None]:
    """The prepared linears [slot 0, slot 1] of a module that has slots."""
    return module.forge_slots  # type: ignore[return-value]


def _prepare(
    kernels: LinearKernels,
    site: LinearSite,
    parts: dict[str, list[torch.Tensor]],
    device: torch.device,
) -> PreparedLinear:
    def fused(kind: str) -> torch.Tensor:
        tensors = parts[kind]
        return (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).to(device)

    if "weight_scale" not in parts:
        return kernels.bf16(fused("weight"))
    input_scale = parts["input_scale"][0].to(device) if "input_scale" in parts else None
    return kernels.int8(fused("weight"), fused("weight_scale"), input_scale)


def _padded(
    tensors: list[torch.Tensor], parameter: Parameter, device: torch.device
) -> torch.Tensor:
    whole = (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).to(device)
    if whole.shape == parameter.shape:
        return whole.contiguous()
    padded = whole.new_zeros(parameter.shape)
    padded[: whole.shape[0]] = whole
    return padded
