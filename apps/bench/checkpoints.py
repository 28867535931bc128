"""The same quantized weights in two forms: our artifact, and vLLM's compressed-tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from forge_ptq.artifact import QuantizedArtifact
from forge_ptq.numerics.plan import QuantPlan
from forge_ptq.numerics.schemes import get_scheme


def quantize_checkpoint(
    model: Path, default: str, overrides: Mapping[str, str], *, absmax: float, version: int = 1
) -> QuantizedArtifact:
    """Artifact of a bf16 HF checkpoint. ``absmax`` stands in for calibration of static layers."""
    state: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        state |= load_file(str(file))
    linears = [n.removesuffix(".weight") for n in state if n.endswith("_proj.weight")]
    layers = QuantPlan.from_config(default, overrides).resolve(linears)
    tensors = {n: t for n, t in state.items() if n.removesuffix(".weight") not in layers}
    for name, scheme in layers.items():
        parts = get_scheme(scheme).quantize(state[f"{name}.weight"], name=name, absmax=absmax)
        tensors |= {f"{name}.{kind}": tensor for kind, tensor in parts.items()}
    if json.loads((model / "config.json").read_text())["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    return QuantizedArtifact.build(
        policy_version=version, model=model.name, layers=layers, tensors=tensors
    )


def write_compressed_tensors(artifact: QuantizedArtifact, model: Path, out: Path) -> None:
    """A checkpoint that vLLM serves by its own W8A8 kernels, with the artifact's very tensors."""
    schemes = set(artifact.manifest.layers.values())
    int8 = schemes - {"bf16"}
    if len(int8) != 1:
        raise ValueError(f"compressed-tensors comparison needs one INT8 scheme, got {schemes}")
    static = int8 == {"int8_static"}
    out.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.is_file() and not file.name.startswith("model"):
            shutil.copy(file, out / file.name)
    save_file(artifact.tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    full = [name for name, scheme in artifact.manifest.layers.items() if scheme == "bf16"]
    side = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", *full],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**side, "strategy": "channel", "dynamic": False},
                "input_activations": {
                    **side,
                    "strategy": "tensor" if static else "token",
                    "dynamic": not static,
                },
            }
        },
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
