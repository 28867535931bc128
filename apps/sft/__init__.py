"""Supervised warm-up of a small policy."""

import os

# Threads that wait sleep instead of spinning: beside another busy process spinning costs up to 10x.
# OpenMP reads this once, so it must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
