"""Policies that need no download: a tiny Qwen3 with its own tokenizer, and SmolLM2-135M."""
