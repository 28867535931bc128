"""torchtitan's model config tree with the sizes of a checkpoint's config.json."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from torch import nn

FAMILIES = {"qwen3": "qwen3", "llama": "llama3"}
"""config.json's model_type -> torchtitan's model folder."""


def model_config(hf: dict[str, Any], *, seq_len: int) -> tuple[Any, Any]:
    """(torchtitan ModelSpec, model config) for a config.json. ValueError names a bad key."""
    model_type = hf.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"config.json model_type: {model_type!r}; expected {sorted(FAMILIES)}")
    for key in ("attention_bias", "mlp_bias"):
        if hf.get(key):
            raise ValueError(f"config.json {key}: {hf[key]!r}; expected false")
    limit = int(hf["max_position_embeddings"])
    if seq_len > limit:
        raise ValueError(f"training.seq_len: {seq_len}; this checkpoint allows at most {limit}")
    family = importlib.import_module(f"torchtitan.models.{FAMILIES[model_type]}")
    flavor = "debugmodel"  # any: only the spec's functions are used, the sizes are the checkpoint's
    spec = family.model_registry(flavor, attn_backend="flex")
    return spec, _model(hf, qwen3=model_type == "qwen3", seq_len=seq_len)


def _model(hf: dict[str, Any], *, qwen3: bool, seq_len: int) -> Any:
    """torchtitan's config tree with the checkpoint's sizes."""
    from torchtitan.models.common import Embedding, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.common.param_init import skip_param_init

    if qwen3:
        from torchtitan.models.qwen3.model import Qwen3Model as Model
        from torchtitan.models.qwen3.model import Qwen3TransformerBlock as Layer
    else:
        from torchtitan.models.llama3.model import (
            Llama3Model as Model,
        )
        from torchtitan.models.llama3.model import (
            Llama3TransformerBlock as Layer,
        )
    dim, heads, vocab = hf["hidden_size"], hf["num_attention_heads"], hf["vocab_size"]
    head_dim = hf.get("head_dim") or dim // heads
    layers = hf["num_hidden_layers"]
    tied = bool(hf.get("tie_word_embeddings"))
    std = float(hf.get("initializer_range", 0.02))
    normal = {"weight": partial(nn.init.normal_, std=std), "bias": nn.init.zeros_}
    # Projections back into the residual stream: scaled down so that its variance does not grow.
    output = {**normal, "weight": partial(nn.init.normal_, std=std / (2 * layers) ** 0.5)}
    embedding = {"weight": skip_param_init} if tied else {"weight": normal["weight"]}

    def norm(size: int) -> Any:
        return RMSNorm.Config(
            normalized_shape=size,
            eps=float(hf["rms_norm_eps"]),
            param_init={"weight": nn.init.ones_},
        )

    def layer() -> Any:
        return Layer.Config(
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
            attention=make_gqa_config(
                dim=dim,
                n_heads=heads,
                n_kv_heads=hf.get("num_key_value_heads") or heads,
                head_dim=head_dim,
                wqkv_param_init=normal,
                wo_param_init=output,
                inner_attention=ScaledDotProductAttention.Config(),
                fuse_qkv=False,
                rope=_rope(hf, head_dim, seq_len, qwen3),
                qk_norm=norm(head_dim) if qwen3 else None,
            ),
            feed_forward=make_ffn_config(
                dim=dim,
                hidden_dim=hf["intermediate_size"],
                w1_param_init=normal,
                w2w3_param_init=output,
            ),
        )

    return Model.Config(
        dim=dim,
        vocab_size=vocab,
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab, embedding_dim=dim, param_init=embedding
        ),
        norm=norm(dim),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=normal),
        layers=[layer() for _ in range(layers)],
    )


def _rope(hf: dict[str, Any], head_dim: int, seq_len: int, qwen3: bool) -> Any:
    """Rotary embedding config. transformers 5 writes rope_parameters, older ones rope_scaling."""
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE

    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    sizes = {"dim": head_dim, "max_seq_len": seq_len, "theta": theta}
    if kind == "default":
        return CosSinRoPE.Config(**sizes) if qwen3 else ComplexRoPE.Config(**sizes, scaling="none")
    if kind == "llama3" and not qwen3:
        return ComplexRoPE.Config(
            **sizes,
            scaling="llama",
            scaling_factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        )
    raise ValueError(f"config.json rope type: {kind!r}; expected 'default', or 'llama3' for Llama")
