"""Fixtures of the integration tests."""

from __future__ import annotations

from tests.integration.runtime_support import rt

__all__ = ["rt"]
