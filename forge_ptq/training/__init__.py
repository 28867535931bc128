"""The policy in full precision on torchtitan: trainer and reference model."""
