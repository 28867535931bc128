"""What a generator serves when the pointer moves, names nothing, or names what cannot be had."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from forge_ptq import store
from forge_ptq.artifact import ArtifactError, ArtifactRef
from forge_ptq.engine.committed import CommittedArtifactError, serve_committed
from forge_ptq.engine.memory import out_of_memory

ONE, TWO = ArtifactRef("one", 1), ArtifactRef("two", 2)


class Slots:
    """Two slots, and a store whose pointer moves when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pointer: ArtifactRef | None) -> None:
        self.pointer = pointer
        self.held: list[str | None] = [None]
        self.live: str | None = None
        self.loads: list[str] = []
        self.on_load: Callable[[ArtifactRef], None] = lambda ref: None
        monkeypatch.setattr(store, "get_committed", self.get_committed)

    async def get_committed(self) -> ArtifactRef | None:
        return self.pointer

    async def take_up(self, artifact_id: str | None) -> bool:
        if artifact_id in self.held:
            self.live = artifact_id
        return self.live == artifact_id

    async def load(self, ref: ArtifactRef) -> None:
        self.loads.append(ref.artifact_id)
        self.on_load(ref)
        self.held.append(ref.artifact_id)
        self.live = ref.artifact_id


async def test_nothing_is_done_where_nothing_is_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(monkeypatch, ONE)
    slots.held, slots.live = ["one"], "one"
    report = await serve_committed(slots)
    assert (report["artifact_id"], report["loaded"], slots.loads) == ("one", False, [])


async def test_without_a_store_or_a_commit_the_checkpoint_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = Slots(monkeypatch, None)
    assert (await serve_committed(slots))["artifact_id"] is None

    async def absent() -> ArtifactRef | None:
        raise store.StoreNotRunning("no store")

    monkeypatch.setattr(store, "get_committed", absent)
    assert (await serve_committed(slots))["artifact_id"] is None
    assert slots.loads == []


async def test_a_store_that_does_not_answer_is_no_reason_to_serve_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = Slots(monkeypatch, None)
    slots.held = []

    async def silent() -> ArtifactRef | None:
        raise store.StoreError("no answer from the store")

    monkeypatch.setattr(store, "get_committed", silent)
    with pytest.raises(store.StoreError, match="no answer"):
        await serve_committed(slots)


async def test_a_pointer_that_moves_during_the_load_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether what it named could still be loaded or not."""
    for gone in (False, True):
        slots = Slots(monkeypatch, ONE)

        def move(ref: ArtifactRef, slots: Slots = slots, gone: bool = gone) -> None:
            if ref == ONE:
                slots.pointer = TWO
                if gone:
                    raise store.StoreError("get one: no such artifact, not complete or dropped")

        slots.on_load = move
        report = await serve_committed(slots)
        assert (report["artifact_id"], slots.live, slots.loads) == ("two", "two", ["one", "two"])


async def test_what_cannot_be_had_is_named_and_nothing_else_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = Slots(monkeypatch, TWO)

    def damaged(ref: ArtifactRef) -> None:
        raise ArtifactError("model.norm.weight: sha256 differs")

    slots.on_load = damaged
    with pytest.raises(CommittedArtifactError) as caught:
        await serve_committed(slots, "the checkpoint is not served in its place")
    assert str(caught.value) == (
        "the committed artifact two (version 2) cannot be served: ArtifactError: model.norm.weight:"
        " sha256 differs; the checkpoint is not served in its place"
    )
    assert slots.loads == ["two"]


async def test_the_checkpoint_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(monkeypatch, None)
    slots.held, slots.live = ["one"], "one"
    with pytest.raises(CommittedArtifactError, match="no artifact is committed"):
        await serve_committed(slots)


def _torch() -> None:
    torch.empty(2**60, dtype=torch.int8)


def _numpy() -> None:
    np.empty(2**60, dtype=np.int8)


def _python() -> None:
    bytearray(2**62)


def _operator() -> None:
    torch.zeros(1).expand(2**58).clone()


@pytest.mark.parametrize("allocate", [_torch, _numpy, _python, _operator])
def test_real_allocation_failures_are_recognised(allocate: Callable[[], None]) -> None:
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        allocate()
    assert out_of_memory(caught.value)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("could not create a memory object"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("forge_slots: slot 1 lacks ['model.norm.weight'] (1 in all)"), False),
        (ArtifactError("a.weight: expected shape [2, 3], got [3, 2]"), False),
        (KeyError("out of memory"), False),
    ],
)
def test_other_errors_are_not_taken_for_one(error: BaseException, expected: bool) -> None:
    assert out_of_memory(error) is expected
