"""Supervised warm-up of a small policy."""
