"""A Qwen3-architecture policy of about 1.2 M parameters with a tokenizer of its own.

**Sizes.** Multiples of 64 everywhere (int8 kernels), head_dim 32 (vLLM's CPU attention), grouped
queries (3 per key/value head), tied embeddings: small, but every code path of a real Qwen3.

**Tokenizer.** A Unigram model over the printable ASCII characters plus the pieces of the task's
language (`" + "`, `"problem: "`, `"<answer>"`). Every digit is one token; pieces carry their
spaces, so a digit never needs a second, spaced form. Decoding joins the pieces: ASCII text always
comes back exactly. A character outside the vocabulary becomes `<unk>`.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
PIECES = (
    " + ", " - ", " * ", " / ", " = ", " =", ": ", ". ", ", ", "? ",
    "<answer>", "</answer>", "\n<answer>",
    "State ", "the ", "final ", "answer ", "to ", "following ", "arithmetic ",
    "problem", "problem: ",
    "Calculate ", "Solve ", "What ", "is ", "of ", "and ", "number ", "numbers ",
)  # fmt: skip
VOCAB_SIZE = 192
"""Tokens of the model; the tokenizer's vocabulary is padded to it."""

MAX_LENGTH = 256
"""Longest sequence, prompt and response together, in tokens."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer. The same on every machine: nothing in it is trained."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    chars = [*string.printable[:95], "\n"]
    vocab = [(token, 0.0) for token in SPECIAL]
    vocab += [(char, -10.0) for char in chars]
    # Fewest tokens wins: a piece costs less than any two characters.
    vocab += [(piece, -2.0 - 0.01 * len(piece)) for piece in PIECES]
    vocab += [(f"<reserved_{i}>", -1e4) for i in range(VOCAB_SIZE - len(vocab))]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=SPECIAL.index("<unk>"), byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def config_dict(
    *, hidden: int = 192, layers: int = 3, intermediate: int = 512, vocab: int = VOCAB_SIZE
) -> dict[str, Any]:
    """config.json of the policy. `hidden` must be a multiple of 192 (six heads of 32)."""
    if hidden % 192:
        raise ValueError(f"hidden: {hidden}; expected a multiple of 192")
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": SPECIAL.index("<bos>"),
        "eos_token_id": SPECIAL.index("<eos>"),
        "pad_token_id": SPECIAL.index("<pad>"),
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": hidden,
        # About 1 / sqrt(hidden): with the usual 0.02 so narrow a model starts slowly.
        "initializer_range": 0.06,
        "intermediate_size": intermediate,
        "max_position_embeddings": MAX_LENGTH,
        "num_attention_heads": hidden // 32,
        "num_hidden_layers": layers,
        "num_key_value_heads": hidden // 96,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "rope_theta": 10000.0,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": vocab,
    }


def write_assets(folder: str | Path, config: dict[str, Any]) -> None:
    """Writes config.json, generation_config.json and the tokenizer's files into `folder`."""
    import json

    folder = Path(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    build_tokenizer().save_pretrained(folder)
