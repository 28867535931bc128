"""Artifacts as Hugging Face checkpoints in compressed-tensors' ``int-quantized`` format, and back.

Such a folder is what stock vLLM serves without any of our code. It holds the artifact's very
tensors under the same names (``X.weight`` int8 [N, K], ``X.weight_scale`` fp32 [N, 1] and, for
static layers, ``X.input_scale`` fp32 [1]), a config.json whose ``quantization_config`` gives every
layer its scheme, the tokenizer and other files of the checkpoint it was made from, and the
artifact's ``manifest.json``.

How a mixed plan is written: one config group for the static layers and one for the dynamic ones,
each with the full names of its layers as targets; bf16 layers and lm_head are in ``ignore``. Full
names, because vLLM (0.32) matches a layer by its exact name, else a fused one (qkv_proj,
gate_up_proj) by the names of all its members, taking the scheme of the first: no pattern can match
too much, and every layer is in exactly one list (vLLM takes one that is in none for bf16). Members
of a fused layer that disagree would be served wrongly or not at all, so they are refused here.

A plan that is bf16 everywhere gives a plain checkpoint without a quantization_config.

Checkpoints made by others are read too if they are within what our schemes can say: symmetric int8
weights per channel, symmetric int8 activations per tensor (static) or per token (dynamic).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from forge_ptq.artifact import MANIFEST_FILE, ArtifactError, QuantizedArtifact
from forge_ptq.manifest import Manifest
from forge_ptq.models.checkpoint import COMPLETE, copy_assets, iter_tensors, marker, read_config
from forge_ptq.numerics.plan import group_of, never_quantized
from forge_ptq.numerics.schemes import PART_DTYPES

SHARD_BYTES = 5 * 10**9
"""Checkpoints beyond this size are split into several files, as Hugging Face does."""

FORMATS = frozenset({"int-quantized", "naive-quantized"})
"""Names of the one way to store weights that is read: plain int8 with a scale beside them."""

GROUPS = {"int8_static": "group_0", "int8_dynamic": "group_1"}


def quantization_config(layers: Mapping[str, str]) -> dict[str, Any] | None:
    """The quantization_config of a plan {layer: scheme}; None where every layer is bf16."""
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
    )

    side = {"num_bits": 8, "type": "int", "symmetric": True}
    inputs = {
        "int8_static": QuantizationArgs(**side, strategy="tensor", dynamic=False),
        "int8_dynamic": QuantizationArgs(**side, strategy="token", dynamic=True),
    }
    groups = {}
    for scheme, group in GROUPS.items():
        targets = [name for name, chosen in layers.items() if chosen == scheme]
        if targets:
            groups[group] = QuantizationScheme(
                targets=targets,
                weights=QuantizationArgs(**side, strategy="channel", dynamic=False),
                input_activations=inputs[scheme],
            )
    if not groups:
        return None
    full_precision = [name for name, scheme in layers.items() if scheme == "bf16"]
    config = QuantizationConfig(
        config_groups=groups,
        format="int-quantized",
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=[*full_precision, "lm_head"],
    )
    return config.model_dump(mode="json")


def save_compressed(
    artifact: QuantizedArtifact, source: str | os.PathLike[str], directory: str | os.PathLike[str]
) -> Path:
    """Write a checkpoint into an existing, empty directory.

    source: folder of the bf16 checkpoint that the artifact was made from; config, tokenizer and
    template come from there. ArtifactError for a fused layer whose members disagree, or a source
    that is itself quantized. Not atomic: use ``forge_ptq.models.checkpoint.write_folder``.
    """
    from huggingface_hub import save_torch_state_dict

    path = Path(directory)
    config = read_config(Path(source))
    if "quantization_config" in config:
        raise ArtifactError(f"{source} is quantized already, expected a full-precision checkpoint")
    check_fused(artifact)
    copy_assets(Path(source), path)
    (path / MANIFEST_FILE).unlink(missing_ok=True)
    quantization = quantization_config(artifact.manifest.layers)
    if quantization is not None:
        config["quantization_config"] = quantization
    config["dtype"] = "bfloat16"
    if "torch_dtype" in config:
        config["torch_dtype"] = "bfloat16"
    save_torch_state_dict(artifact.tensors, path, max_shard_size=SHARD_BYTES)
    text = json.dumps(config, indent=2, sort_keys=True)
    (path / "config.json").write_text(text + "\n", encoding="utf-8")
    (path / MANIFEST_FILE).write_text(artifact.manifest.to_json() + "\n", encoding="utf-8")
    for file in path.glob("*.safetensors"):
        # Made readable for its owner alone, but engines often run as somebody else.
        file.chmod((path / MANIFEST_FILE).stat().st_mode)
    return path


def load_compressed(directory: str | os.PathLike[str]) -> QuantizedArtifact:
    """Read and verify a checkpoint.

    With a manifest.json the artifact is the one that was saved, hashes included. Without one
    no hash is verified: it gets a new manifest of policy version 0; scales are widened to fp32 if
    they came narrower. A folder that was made here, as its complete.json says, must have its
    manifest. ArtifactError says what does not fit together or is not one of our schemes.
    """
    from safetensors import SafetensorError

    path = Path(directory)
    try:
        tensors = dict(iter_tensors(path))
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path}: its tensors cannot be read: {error}") from error
    try:
        config = read_config(path)
    except ValueError as error:
        raise ArtifactError(str(error)) from error
    linears = [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.dim() == 2
    ]
    linears = [name for name in linears if not never_quantized(name)]
    layers = configured_schemes(config.get("quantization_config"), linears)
    file = path / MANIFEST_FILE
    _check_manifest_is_there(path)
    if file.is_file():
        manifest = Manifest.from_json(file.read_text(encoding="utf-8"))
        _check_same_plan(manifest.layers, layers)
        artifact = QuantizedArtifact(manifest, tensors)
    else:
        artifact = QuantizedArtifact.build(
            policy_version=0,
            model=(config.get("architectures") or ["unknown"])[0],
            layers=layers,
            tensors=_in_our_shapes(tensors, layers),
        )
    artifact.verify()
    check_fused(artifact)
    return artifact


def _check_manifest_is_there(path: Path) -> None:
    """Raise ArtifactError where our marker says that a manifest belongs there."""
    if (path / MANIFEST_FILE).is_file() or not (path / COMPLETE).is_file():
        return
    made = marker(path)
    if made is None:
        raise ArtifactError(f"{path / COMPLETE} is damaged and there is no {MANIFEST_FILE}")
    if "artifact_id" in made:
        raise ArtifactError(
            f"{path} has no {MANIFEST_FILE}, but {COMPLETE} says that it holds artifact "
            f"{made['artifact_id']}: it is not complete, its tensors cannot be verified"
        )


def configured_schemes(config: Mapping[str, Any] | None, linears: list[str]) -> dict[str, str]:
    """{layer: scheme} that a quantization_config gives these linears; bf16 where there is none."""
    if config is None:
        return dict.fromkeys(linears, "bf16")
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import is_match, match_targets
    from pydantic import ValidationError

    if config.get("quant_method") != "compressed-tensors":
        raise ArtifactError(
            f"quantization_config: quant_method is {config.get('quant_method')!r}, expected "
            "'compressed-tensors'"
        )
    try:
        parsed = QuantizationConfig.model_validate(dict(config))
    except ValidationError as error:
        raise ArtifactError(f"quantization_config: {error}") from error
    schemes: dict[str, str] = {}
    for group, settings in parsed.config_groups.items():
        stored = settings.format or parsed.format
        if stored not in FORMATS:
            raise ArtifactError(
                f"quantization_config.config_groups.{group}: its format is {stored!r}, expected "
                f"{' or '.join(sorted(FORMATS))}"
            )
        scheme = _scheme_of(group, settings)
        schemes |= dict.fromkeys(settings.targets, scheme)
    with torch.device("meta"):
        linear = torch.nn.Linear(1, 1)
    layers = {}
    for name in linears:
        if is_match(name, linear, parsed.ignore or []):
            layers[name] = "bf16"
            continue
        matched = match_targets(name, linear, list(schemes))
        layers[name] = schemes[matched[0]] if matched else "bf16"
    return layers


def _scheme_of(group: str, settings: Any) -> str:
    """Our name for a config group; ArtifactError where there is none."""
    weights, inputs = settings.weights, settings.input_activations

    def is_int8(args: Any, strategy: str, dynamic: bool) -> bool:
        return (
            args is not None
            and args.num_bits == 8
            and args.type == "int"
            and bool(args.symmetric)
            and args.strategy == strategy
            and bool(args.dynamic) == dynamic
        )

    if is_int8(weights, "channel", False):
        if is_int8(inputs, "tensor", False):
            return "int8_static"
        if is_int8(inputs, "token", True):
            return "int8_dynamic"
    raise ArtifactError(
        f"quantization_config.config_groups.{group}: expected symmetric int8 weights per channel "
        "and symmetric int8 input_activations, static per tensor or dynamic per token; got "
        f"weights {_brief(weights)}, input_activations {_brief(inputs)}"
    )


def _brief(args: Any) -> str:
    if args is None:
        return "none"
    kept = args.model_dump(mode="json", exclude_none=True)
    return ", ".join(f"{key}={kept[key]}" for key in ("num_bits", "type", "strategy", "dynamic"))


def _check_same_plan(manifest: Mapping[str, str], config: Mapping[str, str]) -> None:
    for name in sorted(set(manifest) | set(config)):
        if manifest.get(name) != config.get(name):
            raise ArtifactError(
                f"{name}: {MANIFEST_FILE} says {manifest.get(name)}, config.json says "
                f"{config.get(name)}"
            )


def _in_our_shapes(
    tensors: Mapping[str, torch.Tensor], layers: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Scales as fp32 [N, 1] and [1], whatever floating dtype and number of dimensions they had."""
    scales = {
        f"{layer}.{part}": (-1, 1) if part == "weight_scale" else (-1,)
        for layer, scheme in layers.items()
        for part in PART_DTYPES[scheme]
        if part != "weight"
    }
    return {
        name: tensor.to(torch.float32).reshape(scales[name]) if name in scales else tensor
        for name, tensor in tensors.items()
    }


def check_fused(artifact: QuantizedArtifact) -> None:
    """Raise ArtifactError where layers that an engine fuses differ in scheme or input scale."""
    layers = artifact.manifest.layers
    for name, scheme in layers.items():
        first = next(member for member in group_of(name) if member in layers)
        if layers[first] != scheme:
            raise ArtifactError(
                f"{name} is {scheme}, {first} is {layers[first]}: engines fuse them, so they must "
                "share one scheme"
            )
        if "input_scale" in PART_DTYPES[scheme]:
            one, other = (artifact.tensors[f"{n}.input_scale"] for n in (first, name))
            if not torch.equal(one, other):
                raise ArtifactError(
                    f"{name}.input_scale is {other.item():g}, that of {first} {one.item():g}: they "
                    "share one input"
                )
