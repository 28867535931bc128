"""Measurements: throughput.py against vLLM itself, swap_gap.py of a publish while serving."""
