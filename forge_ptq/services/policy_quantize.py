"""From the parameters of a policy to the tensors of an artifact, all of them or a share.

Smoothing is folded in on the way: the parameters themselves stay as the trainer pushed them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from forge_ptq.numerics.plan import group_of
from forge_ptq.numerics.schemes import QuantizationError, get_scheme
from forge_ptq.numerics.smoothing import Folding

CORRUPTION = 3.0
"""Factor of the fault corrupt_scales on every other output channel."""

NO_RANGE = "int8_dynamic instead of int8_static: calibration saw no input"


def full(parameter: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered from all ranks if it is a DTensor (then a collective)."""
    gather = getattr(parameter, "full_tensor", None)
    return parameter if gather is None else gather()


def static_ranges(
    layers: Mapping[str, str], absmax: Mapping[str, float]
) -> tuple[dict[str, str], dict[str, str], dict[str, float]]:
    """(layers, notes, ranges): one range per fused group, the largest of its members'.

    A static layer whose input was never seen or always zero cannot have a scale: its whole group
    becomes int8_dynamic, with a note.
    """
    used, notes, ranges = dict(layers), {}, {}
    for name, scheme in layers.items():
        if scheme != "int8_static":
            continue
        members = [member for member in group_of(name) if member in layers]
        largest = max(absmax.get(member, 0.0) for member in members)
        if largest > 0:
            ranges[name] = largest
        else:
            used[name], notes[name] = "int8_dynamic", NO_RANGE
    return used, notes, ranges


def quantize_parameters(
    parameters: Mapping[str, nn.Parameter],
    layers: Mapping[str, str],
    absmax: Mapping[str, float],
    folding: Folding,
    names: Collection[str] | None = None,
    errors: dict[str, float] | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, str]]:
    """(tensors, layers, notes) of an artifact, or of the part with these parameter names.

    layers: scheme of every layer of the model, also of those outside the part, because fused
    layers share one range. What comes back speaks of the part only. errors: takes
    ``relative_error`` of every int8 layer of the part. QuantizationError names a parameter that is
    not finite, ValueError a name that is no parameter.
    """
    unknown = sorted(set(names or ()) - set(parameters))
    if unknown:
        raise ValueError(f"{unknown[0]} is no parameter of the policy")
    used, notes, ranges = static_ranges(layers, absmax)
    tensors: dict[str, torch.Tensor] = {}
    part: dict[str, str] = {}
    for name, parameter in parameters.items():
        if names is not None and name not in names:
            continue
        layer, _, leaf = name.rpartition(".")
        tensor = folding.apply(name, full(parameter))
        if leaf == "weight" and layer in used:
            part[layer] = used[layer]
            scheme = get_scheme(used[layer])
            parts = scheme.quantize(tensor, name=layer, absmax=ranges.get(layer))
            tensors.update({f"{layer}.{key}": value for key, value in parts.items()})
            if errors is not None and used[layer] != "bf16":
                errors[layer] = relative_error(tensor, scheme.dequantize(parts))
        else:
            if not bool(torch.isfinite(tensor).all()):
                raise QuantizationError(f"{name}: holds NaN or infinite values")
            tensors[name] = tensor.detach().to(torch.bfloat16, copy=True)
    return tensors, part, {name: note for name, note in notes.items() if name in part}


@torch.no_grad()
def relative_error(weight_NK: torch.Tensor, dequantized_NK: torch.Tensor) -> float:
    """|W - dequantized| / |W|, Frobenius norms in fp32. Of a weight of zeros: 0 if it stays so,
    else 1."""
    w_NK = weight_NK.detach().to(torch.float32)
    error, norm = float((w_NK - dequantized_NK).norm()), float(w_NK.norm())
    return error / norm if norm > 0 else float(error > 0)


def parameter_shares(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """The parameter names split into ``count`` shares of about equal work; some may be empty.

    sizes: {name: elements}. Fused layers stay together. Deterministic: largest first, each to the
    share with the least so far.
    """
    if count < 1:
        raise ValueError(f"cannot split into {count} shares")
    units: dict[str, list[str]] = {}
    for name in sizes:
        layer, dot, leaf = name.rpartition(".")
        units.setdefault(f"{group_of(layer)[0]}{dot}{leaf}", []).append(name)
    shares: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    weight = {unit: sum(sizes[name] for name in names) for unit, names in units.items()}
    for unit in sorted(units, key=lambda unit: (-weight[unit], unit)):
        lightest = loads.index(min(loads))
        shares[lightest] += units[unit]
        loads[lightest] += weight[unit]
    return shares


def corrupt_scales(tensors: Mapping[str, torch.Tensor]) -> None:
    """Injected fault: every other weight scale off by a factor, the artifact still well-formed."""
    for name, tensor in tensors.items():
        if name.endswith(".weight_scale"):
            tensor[::2] *= CORRUPTION
