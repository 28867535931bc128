"""`ActorHandle`: what `as_actor` returns; Monarch's actor mesh with honest failures.

Every call has a deadline, ends at once when a process of the actor dies (`ActorDied`), and an
exception that the endpoint raised reaches the caller as it is: same type, with Monarch's
`ActorError` (which carries the remote traceback) as its cause. Handles may be sent to other actors.
"""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import socket
from dataclasses import dataclass, replace
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from forge_ptq.runtime.own.death import WATCH, ProcessId
from forge_ptq.runtime.own.types import ActorDied, RequestTimeout


@dataclass(frozen=True)
class ProcessRef:
    """The processes behind an actor, by rank. `watched` are those that run on this machine."""

    name: str
    pids: tuple[int, ...]
    watched: tuple[ProcessId, ...]

    def dead_pid(self) -> int | None:
        """Pid of a process that is known to be dead, if any."""
        return next((p.pid for p in self.watched if not p.alive()), None)

    def any_alive(self) -> bool:
        """Whether at least one local process still runs."""
        return any(process.alive() for process in self.watched)

    def kill(self) -> None:
        """SIGKILL to every local process that still runs."""
        for process in self.watched:
            if process.alive():
                try:
                    os.kill(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # it ended between the two lines


async def call_watched(
    future: Any,
    *,
    processes: ProcessRef,
    what: str,
    timeout_s: float | None,
    unwrap_errors: bool = True,
) -> Any:
    """Awaits Monarch's `future` with a deadline and a watch on the processes that must answer.

    Raises ActorDied, RequestTimeout, or whatever the endpoint itself raised (inside Monarch's
    ActorError if `unwrap_errors` is false).
    """
    loop = asyncio.get_running_loop()
    death: asyncio.Future[int] = loop.create_future()

    def settle(pid: int) -> None:
        if not death.done():
            death.set_result(pid)

    def died(pid: int) -> None:
        try:
            loop.call_soon_threadsafe(settle, pid)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    async def answer_of() -> Any:
        return await future

    answer = asyncio.ensure_future(answer_of())
    WATCH.subscribe(processes.watched, died)
    try:
        done, _ = await asyncio.wait(
            {answer, death}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            raise RequestTimeout(f"{what} did not answer within {timeout_s:g} s")
        if answer not in done:
            raise ActorDied(f"{what}: process {death.result()} of {processes.name} died")
        return answer.result()
    except ActorError as error:
        if unwrap_errors and isinstance(error.exception, Exception):
            raise error.exception from error
        raise
    except SupervisionError as error:
        pid = processes.dead_pid()
        where = f"process {pid}" if pid is not None else f"actor (processes {processes.pids})"
        raise ActorDied(f"{what}: {where} of {processes.name} died: {error}") from error
    finally:
        WATCH.unsubscribe(processes.watched, died)
        answer.cancel()


class ActorEndpoint:
    """One endpoint of an actor: `call` (all ranks), `call_one`, `choose`, `broadcast`."""

    def __init__(self, handle: ActorHandle, name: str, endpoint: Any) -> None:
        self._handle = handle
        self._name = name
        self._endpoint = endpoint

    async def _await(self, future: Any) -> Any:
        handle = self._handle
        return await call_watched(
            future,
            processes=handle.processes,
            what=f"{handle.actor_name}.{self._name}",
            timeout_s=handle.request_timeout_s,
            unwrap_errors=handle.unwrap_errors,
        )

    async def call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls every rank; returns Monarch's ValueMesh of results."""
        return await self._await(self._endpoint.call(*args, **kwargs))

    async def call_one(self, *args: Any, **kwargs: Any) -> Any:
        """Calls an actor of one rank and returns its result."""
        return await self._await(self._endpoint.call_one(*args, **kwargs))

    async def choose(self, *args: Any, **kwargs: Any) -> Any:
        """Calls one rank, picked at random, and returns its result."""
        return await self._await(self._endpoint.choose(*args, **kwargs))

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Sends to every rank and returns at once: no result, no error."""
        self._endpoint.broadcast(*args, **kwargs)


class ActorHandle:
    """A spawned actor. Attributes are its endpoints, else those of Monarch's actor mesh."""

    def __init__(
        self,
        mesh: Any,
        actor_name: str,
        processes: ProcessRef,
        request_timeout_s: float | None,
        unwrap_errors: bool = True,
    ) -> None:
        self.mesh = mesh
        self.actor_name = actor_name
        self.processes = processes
        self.request_timeout_s = request_timeout_s
        self.unwrap_errors = unwrap_errors

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "mesh":
            raise AttributeError(name)
        value = getattr(self.mesh, name)
        return ActorEndpoint(self, name, value) if hasattr(value, "call_one") else value

    def __repr__(self) -> str:
        return f"ActorHandle({self.actor_name}, pids={list(self.processes.pids)})"

    def slice(self, **kwargs: Any) -> ActorHandle:
        """Handle of some of the ranks."""
        part = copy.copy(self)
        part.mesh = self.mesh.slice(**kwargs)
        return part

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_host": socket.gethostname()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        host = state.pop("_host")
        self.__dict__.update(state)
        if host != socket.gethostname():  # over there other processes have these pids
            self.processes = replace(self.processes, watched=())
