"""The served model by HF tensor names, and the check that an artifact delivers all of it.

vLLM fuses q/k/v and gate/up into one module each; artifacts know only HF names. ``ModelLayout``
lists, for a built vLLM model, every linear with the HF modules it is made of, and every other
parameter with the HF tensors it is made of. ``plan`` matches an artifact against that list: each
expected tensor must be there once with the right shape and dtype, and nothing may be left over.
vLLM's own loader does not promise this: it keeps the old tensor where none is delivered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from forge_ptq.artifact import ArtifactError, QuantizedArtifact
from forge_ptq.numerics.schemes import PART_DTYPES


@dataclass(frozen=True)
class Part:
    """A HF module or tensor, and how many rows of the fused one it fills."""

    name: str
    rows: int


@dataclass(frozen=True)
class LinearSite:
    """One vLLM linear: its module, its parts in row order, its input width K."""

    name: str
    module: nn.Module
    parts: tuple[Part, ...]
    in_features: int


@dataclass(frozen=True)
class RestSite:
    """One other parameter. ``rows`` of a vocabulary table are fewer than the padded parameter's."""

    name: str
    parameter: nn.Parameter
    parts: tuple[Part, ...]

    @property
    def part_shapes(self) -> list[tuple[int, ...]]:
        """Shape of each part's HF tensor."""
        return [(part.rows, *self.parameter.shape[1:]) for part in self.parts]


@dataclass
class FillPlan:
    """A checked artifact, arranged by vLLM module, ready to be put into a slot."""

    linears: dict[str, dict[str, list[torch.Tensor]]] = field(default_factory=dict)
    """Linear site name -> part name (weight, ...) -> tensors of its HF modules, in row order."""
    rest: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Parameter name -> tensors of its parts, in row order."""
    nbytes: int = 0


class ModelLayout:
    """HF names of a vLLM model whose linears use forge_slots. Tied parameters appear once."""

    def __init__(self, model: nn.Module, linear_modules: Mapping[str, nn.Module]) -> None:
        packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        self.linears: dict[str, LinearSite] = {}
        self.rest: dict[str, RestSite] = {}
        self.tied: dict[str, str] = {}
        for name, module in linear_modules.items():
            sizes = tuple(int(size) for size in module.forge_part_rows)  # type: ignore[union-attr]
            hf_names = _hf_names(name, packed, len(sizes))
            parts = tuple(Part(n, rows) for n, rows in zip(hf_names, sizes, strict=True))
            in_features = int(module.forge_in_features)  # type: ignore[arg-type]
            self.linears[name] = LinearSite(name, module, parts, in_features)
        first_name: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            owner, _, leaf = name.rpartition(".")
            if owner in linear_modules and leaf == "weight":
                continue
            if id(parameter) in first_name:
                self.tied[name] = first_name[id(parameter)]
                continue
            first_name[id(parameter)] = name
            self.rest[name] = self._rest_site(name, parameter, model.get_submodule(owner), packed)

    def _rest_site(
        self, name: str, parameter: nn.Parameter, owner: nn.Module, packed: Mapping[str, list[str]]
    ) -> RestSite:
        owner_name, _, leaf = name.rpartition(".")
        if owner_name in self.linears:  # the bias of a fused linear is fused like its weight
            parts = tuple(Part(f"{p.name}.{leaf}", p.rows) for p in self.linears[owner_name].parts)
        elif isinstance(owner, VocabParallelEmbedding):
            parts = (Part(name, owner.org_vocab_size),)
        else:
            if parameter.dim() == 0:
                raise RuntimeError(f"forge_slots: {name} is a scalar parameter, not supported")
            parts = (Part(name, parameter.shape[0]),)
        return RestSite(name, parameter, parts)

    def hf_linears(self) -> dict[str, LinearSite]:
        """HF module name -> the site it is part of."""
        return {part.name: site for site in self.linears.values() for part in site.parts}

    def hf_tensor_names(self) -> set[str]:
        """Names of the tensors that a bf16 HF checkpoint of this model has."""
        names = {f"{name}.weight" for name in self.hf_linears()}
        return names | {part.name for site in self.rest.values() for part in site.parts}

    def check_checkpoint(self, names: set[str]) -> None:
        """Raise unless a checkpoint's tensor names are exactly this layout's (ties aside)."""
        expected = self.hf_tensor_names()
        extra = {
            n for n in names - expected - set(self.tied) if not n.endswith("rotary_emb.inv_freq")
        }
        missing = expected - names
        if missing or extra:
            raise RuntimeError(
                "forge_slots: this architecture's tensors are not understood: "
                f"checkpoint lacks {sorted(missing)[:3]}, has besides {sorted(extra)[:3]}"
            )

    def plan(self, artifact: QuantizedArtifact) -> FillPlan:
        """Match an artifact with the model. ArtifactError names the first thing that is wrong."""
        tensors = dict(artifact.tensors)
        layers = artifact.manifest.layers
        known = self.hf_linears()
        unknown = sorted(set(layers) - set(known) - {"lm_head"})
        if unknown:
            raise ArtifactError(f"{unknown[0]}: the served model has no such linear layer")
        plan = FillPlan(nbytes=sum(t.numel() * t.element_size() for t in tensors.values()))
        for site in self.linears.values():
            scheme = _one_scheme(site, layers)
            plan.linears[site.name] = {
                kind: [
                    _take(tensors, f"{part.name}.{kind}", _linear_shape(kind, part, site), dtype)
                    for part in site.parts
                ]
                for kind, dtype in PART_DTYPES[scheme].items()
            }
            _check_scales(site, plan.linears[site.name])
        for rest in self.rest.values():
            plan.rest[rest.name] = [
                _take(tensors, part.name, shape, rest.parameter.dtype)
                for part, shape in zip(rest.parts, rest.part_shapes, strict=True)
            ]
        for alias, name in self.tied.items():
            copy = tensors.pop(alias, None)
            if copy is not None and not torch.equal(copy, plan.rest[name][0]):
                raise ArtifactError(f"{alias}: tied to {name} in this model, but not equal to it")
        if tensors:
            raise ArtifactError(
                f"{sorted(tensors)[0]}: the served model has no place for it "
                f"({len(tensors)} tensors left over)"
            )
        return plan


def _hf_names(name: str, packed: Mapping[str, list[str]], count: int) -> list[str]:
    parent, _, leaf = name.rpartition(".")
    leaves = packed.get(leaf, [leaf])
    if len(leaves) != count:
        raise RuntimeError(
            f"forge_slots: {name} has {count} parts, but the model maps it to {leaves}"
        )
    return [f"{parent}.{one}" if parent else one for one in leaves]


def _one_scheme(site: LinearSite, layers: Mapping[str, str]) -> str:
    missing = [part.name for part in site.parts if part.name not in layers]
    if missing:
        raise ArtifactError(f"{missing[0]}: the artifact's manifest gives it no scheme")
    schemes = {layers[part.name] for part in site.parts}
    if len(schemes) > 1:
        listed = ", ".join(f"{part.name}={layers[part.name]}" for part in site.parts)
        raise ArtifactError(f"{site.name}: fused layers must share one scheme, got {listed}")
    scheme = schemes.pop()
    if scheme not in PART_DTYPES:
        raise ArtifactError(f"{site.name}: unknown scheme {scheme!r}")
    return scheme


def _linear_shape(kind: str, part: Part, site: LinearSite) -> tuple[int, ...]:
    shapes = {
        "weight": (part.rows, site.in_features),
        "weight_scale": (part.rows, 1),
        "input_scale": (1,),
    }
    return shapes[kind]


def _take(
    tensors: dict[str, torch.Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    if name not in tensors:
        raise ArtifactError(f"{name}: missing, the served model needs it")
    tensor = tensors.pop(name)
    if tuple(tensor.shape) != shape:
        raise ArtifactError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise ArtifactError(f"{name}: expected dtype {dtype}, got {tensor.dtype}")
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise ArtifactError(f"{name}: holds NaN or infinite values")
    return tensor


def _check_scales(site: LinearSite, kinds: Mapping[str, list[torch.Tensor]]) -> None:
    for kind in ("weight_scale", "input_scale"):
        for part, tensor in zip(site.parts, kinds.get(kind, []), strict=kind in kinds):
            if not bool((tensor > 0).all()):
                raise ArtifactError(f"{part.name}.{kind}: scales must be positive")
    shared = kinds.get("input_scale", [])
    for part, tensor in zip(site.parts[1:], shared[1:], strict=True) if shared else ():
        if not torch.equal(tensor, shared[0]):
            raise ArtifactError(
                f"{part.name}.input_scale: {float(tensor):g} differs from that of "
                f"{site.parts[0].name} ({float(shared[0]):g}); they share one input"
            )
