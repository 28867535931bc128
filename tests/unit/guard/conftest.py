"""A store in memory, and the metrics that are recorded."""

from __future__ import annotations

import pytest

from forge_ptq.services import candidate, climb, publish_metrics, serving
from tests.integration.publish_doubles import MemoryStore


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    for module in (candidate, climb, serving):
        monkeypatch.setattr(module, "GRACE_S", 0.0)
    made = MemoryStore()
    made.install(monkeypatch)
    return made


@pytest.fixture
def metrics(monkeypatch):
    recorded: list[tuple[str, float]] = []
    monkeypatch.setattr(
        publish_metrics, "record_metric", lambda name, value, _: recorded.append((name, value))
    )
    return recorded
