"""Calls to the generator and the quantizer, whether they are services or single actors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from forge_ptq.services.crew import FleetError
from forge_ptq.services.guard import StagedSlot

T = TypeVar("T")


class PublishError(RuntimeError):
    """A publish that cannot go on; the message becomes the verdict's reason."""


async def call_one(handle: Any, endpoint: str, *args: Any, deadline_s: float) -> Any:
    """One replica of a service (as it routes), or the actor; PublishError past the deadline."""
    bound = getattr(handle, endpoint)
    call = getattr(bound, "route", None) or bound.call_one
    return await within(call(*args), endpoint, deadline_s)


async def call_all(handle: Any, endpoint: str, *args: Any, deadline_s: float) -> list[Any]:
    """Every healthy replica (None where one died meanwhile), or the one actor."""
    bound = getattr(handle, endpoint)
    fanout = getattr(bound, "fanout", None)
    if fanout is not None:
        return list(await within(fanout(*args), endpoint, deadline_s))
    return [await within(bound.call_one(*args), endpoint, deadline_s)]


async def within(call: Awaitable[Any], endpoint: str, deadline_s: float) -> Any:
    """The call's result; PublishError past the deadline."""
    try:
        async with asyncio.timeout(deadline_s):
            return await call
    except TimeoutError as error:
        if str(error):  # the runtime's own, which says more
            raise
        raise PublishError(f"no answer to {endpoint} within {deadline_s:g} s") from error


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Work that must not stop half-way: a cancellation waits for its end. It has deadlines."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            cancelled.add_note(f"after {type(failure).__name__}: {failure}")
        raise cancelled
    return task.result()


def survivors(results: Sequence[Any], what: str) -> list[Any]:
    """All results, PublishError if a replica died under the call."""
    dead = sum(result is None for result in results)
    if dead:
        raise PublishError(f"{dead} of {len(results)} generator replicas died during {what}")
    return list(results)


def live_artifact(description: Mapping[str, Any]) -> str | None:
    """Artifact that a generator serves, from its ``describe()``."""
    return description["slots"][description["live"]]["artifact_id"]


def staged_slot(description: Mapping[str, Any]) -> StagedSlot:
    """The idle slot of a generator, from its ``describe()``."""
    idle = description["slots"][1 - description["live"]]
    return StagedSlot(
        artifact_id=idle["artifact_id"],
        complete=idle["state"] == "ready" and not description["staging"],
        layers=dict(idle["layers"]),
    )


def first_line(error: BaseException) -> str:
    """What went wrong, short enough for a reason; the log has the traceback."""
    if isinstance(error, PublishError | FleetError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
