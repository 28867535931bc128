"""How many int8 weight codes change from version to version.

A quantized policy moves in jumps: a trainer's step is far smaller than a code, so most codes stay
and some flip. Far more flips than usual mean that scales or smoothing moved, or the policy leapt.

A replica compares what it quantizes with what it quantized before, layer by layer; layers that it
did not have then, or not in int8, count in neither number. Before is the last version of which it
had the layer: usually the one before, several versions ago if other replicas took the layer since,
or if versions in between were served in full precision or not quantized at all.

To keep memory small it remembers at most SAMPLED codes of a layer, evenly spaced: exact for small
layers, within 0.2 points for others.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

SAMPLED = 2**16


class CodeFlips:
    """The codes of the last version quantized, and of the one before it."""

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[int, torch.Tensor]]] = {}

    def compare(self, version: int, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        """(codes changed, codes compared) of a version's int8 weights, which are remembered.

        Another candidate of a version is compared with the version before, not with the first.
        """
        changed = compared = 0
        for name, tensor in tensors.items():
            if tensor.dtype != torch.int8:
                continue
            codes = tensor.reshape(-1)
            stride = max(1, -(-codes.numel() // SAMPLED))
            codes = codes[::stride].to("cpu", copy=True)
            others = [entry for entry in self._kept.get(name, []) if entry[0] != version]
            if others and others[-1][1].shape == codes.shape:
                changed += int((others[-1][1] != codes).sum())
                compared += codes.numel()
            self._kept[name] = [*others[-1:], (version, codes)]
        return changed, compared
