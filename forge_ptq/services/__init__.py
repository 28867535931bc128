"""Forge services of quantization: sampler, quantizer, guard, and PTQ, the facade for apps."""
