"""Weights of a policy version on their way into a module tree.

    intake = Intake(model)
    slices = intake.slices(version, shapes)    # what to fetch, before anything is fetched
    intake.load(version, weights, parts=True)  # with those slices fetched

On a tensor-parallel rank the slices are its rows of q, k, v, gate and up and its columns of o and
down. Everything else is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from forge_ptq.services.policy_tp import assign, held


class Intake:
    """Knows a model's parameters by all of their HF names, and which part of each is here."""

    def __init__(self, model: nn.Module) -> None:
        self.architecture = type(model).__name__
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._owner = {name: name for name in self.parameters}
        by_parameter = {id(parameter): name for name, parameter in self.parameters.items()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._owner[name] = by_parameter[id(parameter)]

    def slices(
        self, version: int, shapes: Mapping[str, Sequence[int]]
    ) -> dict[str, tuple[slice, ...]]:
        """The part of each of a version's tensors that this rank holds; none for whole ones.

        shapes: of the version's whole tensors by HF name. ValueError naming a tensor that is
        missing, unknown or has another shape.
        """
        self._check(version, self._canonical(shapes))
        parts = {name: held(self.parameters[self._owner[name]]) for name in shapes}
        return {name: part for name, part in parts.items() if part is not None}

    @torch.no_grad()
    def load(self, version: int, weights: Mapping[str, torch.Tensor], *, parts: bool) -> None:
        """Copy a version in; parts: tensors that ``slices`` names come as those slices.

        A tied weight may come under either or both of its names, but then equal. ValueError as
        from ``slices``; nothing has been copied then.
        """
        found = self._canonical(weights)
        for name, tensor in weights.items():
            first = found[self._owner[name]]
            if first is not tensor and not torch.equal(first, tensor):
                raise ValueError(f"{name} is tied to another tensor of the version, but differs")
        self._check(version, {name: tensor.shape for name, tensor in found.items()}, parts=parts)
        for name, parameter in self.parameters.items():
            assign(parameter, found[name], part=parts)

    def _canonical(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The same under the model's own names; of tied ones the first."""
        found: dict[str, Any] = {}
        for name, value in given.items():
            if name not in self._owner:
                raise ValueError(f"{name}: {self.architecture} has no such parameter")
            found.setdefault(self._owner[name], value)
        return found

    def _check(
        self, version: int, shapes: Mapping[str, Sequence[int]], *, parts: bool = False
    ) -> None:
        missing = sorted(set(self.parameters) - set(shapes))
        if missing:
            raise ValueError(
                f"policy version {version}: {missing[0]} is missing ({len(missing)} tensors are)"
            )
        for name, parameter in self.parameters.items():
            expected: Iterable[int] = parameter.shape
            if parts and (part := held(parameter)) is not None:
                expected = [each.stop - each.start for each in part]
            if list(shapes[name]) != list(expected):
                raise ValueError(
                    f"policy version {version}: {name} has shape {list(shapes[name])}, "
                    f"{self.architecture} expects {list(expected)}"
                )
