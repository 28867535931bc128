"""Which linear layer gets which scheme.

A plan is a default scheme and overrides by name pattern (shell globs on HF module names; ``*``
also crosses dots). Where several patterns match a layer the one written last wins. Embeddings,
norms, lm_head and routers are never quantized and never appear in a resolved plan.

Engines fuse q/k/v and gate/up into one matrix with one input, so the members of such a group
must agree on their scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchao.quantization import FqnToConfig

FUSED_GROUPS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
)
"""Leaf names that an engine fuses when they have the same parent module."""

NEVER_QUANTIZED_LEAVES = frozenset(
    {"lm_head", "embed_tokens", "wte", "router", "gate", "shared_expert_gate", "score"}
)

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Architectures of one wiring: linears q, k, v and o, gate, up and down, attention by whole heads,
before each block a norm that multiplies by its plain weight, and nothing behind the block. (Gemma's
norms multiply by 1 + weight, others put a norm behind attention.)"""

SCHEME_NAMES = ("int8_static", "int8_dynamic", "bf16")


class PlanError(ValueError):
    """A plan that cannot be carried out: `reason` names the layers at fault, `key` the entry, if it
    is one."""

    def __init__(self, reason: str, key: str = "") -> None:
        super().__init__(f"{key}: {reason}" if key else reason)
        self.reason, self.key = reason, key


def never_quantized(name: str) -> bool:
    """True for embeddings, norms, lm_head and routers (``mlp.gate``, not ``gate_proj``)."""
    leaf = name.rsplit(".", 1)[-1]
    return leaf in NEVER_QUANTIZED_LEAVES or "norm" in leaf or "embed" in leaf


def group_of(name: str) -> tuple[str, ...]:
    """Full names of the layers that an engine would fuse with name (itself included, in order)."""
    parent, _, leaf = name.rpartition(".")
    for group in FUSED_GROUPS:
        if leaf in group:
            return tuple(f"{parent}.{member}" if parent else member for member in group)
    return (name,)


def sites_of(layers: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """{site: members} of the distinct linear inputs among these layers.

    A site is one input that one or several of the layers read: members of a fused group share
    theirs. It carries the name of its first member (in the group's order), and sites come in the
    order in which the layers name them, so that every rank counts them alike.
    """
    names = list(dict.fromkeys(layers))
    known = set(names)
    sites: dict[str, tuple[str, ...]] = {}
    for name in names:
        members = tuple(member for member in group_of(name) if member in known)
        sites.setdefault(members[0], members)
    return sites


def _check_scheme(scheme: object, where: str) -> str:
    if not isinstance(scheme, str) or scheme not in SCHEME_NAMES:
        raise PlanError(
            f"unknown scheme {scheme!r}; expected one of {', '.join(SCHEME_NAMES)}", where
        )
    return scheme


@dataclass(frozen=True)
class QuantPlan:
    """A default scheme plus overrides {glob: scheme}, in the order they were written."""

    default: str = "int8_dynamic"
    overrides: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_config(cls, default: str, overrides: Mapping[str, str] | None = None) -> QuantPlan:
        """Check the scheme names; patterns are checked against a model by ``resolve``."""
        _check_scheme(default, "plan.default")
        for pattern, scheme in (overrides or {}).items():
            _check_scheme(scheme, f"plan.overrides[{pattern}]")
        return cls(default, dict(overrides or {}))

    def resolve(self, linear_names: Iterable[str]) -> dict[str, str]:
        """{name: scheme} for every linear of the model that may be quantized.

        Raises PlanError for a pattern that matches nothing, a pattern that asks for a layer that
        is never quantized to be quantized, and fused groups that disagree.
        """
        names = list(linear_names)
        if len(set(names)) != len(names):
            raise PlanError("the model's linear names are not unique")
        candidates = [name for name in names if not never_quantized(name)]
        for pattern, scheme in self.overrides.items():
            self._check_pattern(pattern, scheme, names)
        layers = {name: self._scheme_for(name) for name in candidates}
        self._check_groups(layers)
        return layers

    def override_all(self, scheme: str) -> QuantPlan:
        """The plan in which every layer has one scheme."""
        return QuantPlan(_check_scheme(scheme, "scheme_override"), {})

    @staticmethod
    def to_fqn_config(
        layers: Mapping[str, str],
        absmax: Mapping[str, float] | None = None,
        *,
        stock: bool = False,
        input_dims: int = 3,
    ) -> FqnToConfig:
        """A resolved plan for ``torchao.quantize_``; see ``numerics.torchao_plan``."""
        from forge_ptq.numerics.torchao_plan import fqn_config

        return fqn_config(layers, absmax, stock=stock, input_dims=input_dims)

    def _scheme_for(self, name: str) -> str:
        chosen = self.default
        for pattern, scheme in self.overrides.items():
            if fnmatchcase(name, pattern):
                chosen = scheme
        return chosen

    @staticmethod
    def _check_pattern(pattern: str, scheme: str, names: list[str]) -> None:
        key = f"plan.overrides[{pattern}]"
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            near = get_close_matches(pattern, names, n=1, cutoff=0.0)
            hint = f"; the closest layer is {near[0]!r}" if near else ""
            raise PlanError(f"matches none of the model's {len(names)} linear layers{hint}", key)
        protected = [name for name in matched if never_quantized(name)]
        if scheme != "bf16" and len(protected) == len(matched):
            raise PlanError(
                f"{protected[0]!r} is never quantized "
                "(embeddings, norms, lm_head and routers stay bf16)",
                key,
            )

    @staticmethod
    def _check_groups(layers: Mapping[str, str]) -> None:
        for name in layers:
            members = [member for member in group_of(name) if member in layers]
            schemes = {member: layers[member] for member in members}
            if len(set(schemes.values())) > 1:
                listed = ", ".join(f"{member}={scheme}" for member, scheme in schemes.items())
                raise PlanError(
                    f"layers that the engine fuses must share one scheme, got {listed}; "
                    "write one pattern that matches them all"
                )
