"""Serving what the store says is committed: when a generator starts, and when it has strayed.

A generator never falls back to the checkpoint that its engine was built from once an artifact is
committed: it would serve an old policy under a wrong version, silently. If the committed artifact
cannot be had (dropped, damaged, the store does not answer) the process does not come up. The
service tries it again, with growing pauses, and reads the pointer anew each time, so that a newer
commit heals it; after its last attempt the replica is given up, and when no other is left requests
fail with ServiceUnavailable, which quotes the error.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from forge_ptq.artifact import ArtifactRef


class CommittedArtifactError(RuntimeError):
    """What is committed cannot be served, so nothing is."""


class Slots(Protocol):
    """What is needed of a generator."""

    async def take_up(self, artifact_id: str | None) -> bool:
        """Serve an artifact (None: the checkpoint) if a slot holds it; whether it serves now."""
        ...

    async def load(self, ref: ArtifactRef) -> None:
        """Stage an artifact from the store and commit it."""
        ...


async def serve_committed(slots: Slots, what: str = "nothing is served") -> dict[str, Any]:
    """Make what serves the committed artifact; the checkpoint if none is committed.

    Returns {"artifact_id" (None: the checkpoint), "loaded": whether it came from the store,
    "seconds"}. CommittedArtifactError if that does not work, with ``what`` follows from it.
    """
    started = time.perf_counter()
    loaded = False
    while True:
        ref = await committed()
        artifact_id = ref.artifact_id if ref is not None else None
        if await slots.take_up(artifact_id):
            seconds = time.perf_counter() - started
            return {"artifact_id": artifact_id, "loaded": loaded, "seconds": seconds}
        if ref is None:
            raise CommittedArtifactError(
                f"no artifact is committed, and the checkpoint is no longer in a slot; {what}"
            )
        try:
            await slots.load(ref)
            loaded = True
        except Exception as error:
            if await committed() != ref:
                continue  # the pointer moved meanwhile, and what it named may be gone
            raise CommittedArtifactError(
                f"the committed artifact {ref.artifact_id} (version {ref.policy_version}) cannot "
                f"be served: {type(error).__name__}: {error}; {what}"
            ) from error


async def committed() -> ArtifactRef | None:
    """The committed artifact; None without a store, so that a generator also runs alone."""
    from forge_ptq import store

    try:
        return await store.get_committed()
    except store.StoreNotRunning:
        return None
