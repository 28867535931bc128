"""GRPO with an INT8 generator."""
