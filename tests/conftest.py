"""Shared by all tests: nothing heavy is imported here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported anywhere: spinning OpenMP threads of several processes on few cores slow
# each other down many times over.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tests never reach out to a hub or to W&B.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT
