"""Quantization maths: pure functions on tensors. Imports torch and torchao only, no actors."""
