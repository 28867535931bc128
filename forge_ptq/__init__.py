"""forge_ptq: reinforcement learning of LLMs whose rollouts run quantized, safely."""

__version__ = "0.1.0"
