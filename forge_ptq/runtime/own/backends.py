"""Where reduced metrics go. Each backend has `start`, `log`, `finish`."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from monarch.actor import endpoint

from forge_ptq.runtime.own.actor import ForgeActor

LOGGING_MODES = ("global_reduce", "per_rank_reduce", "per_rank_no_reduce")
WANDB_GROUP = "light"
"""Colocate group whose process holds the wandb run."""
WANDB_TIMEOUT_S = 120.0

console = logging.getLogger("forge_ptq.metrics")


class Backend(Protocol):
    """Takes one dict of values per step. `step` None: streamed samples without a step."""

    async def start(self) -> None:
        """Opens the backend."""

    async def log(self, step: int | None, values: dict[str, float]) -> None:
        """Writes values."""

    async def finish(self) -> None:
        """Closes the backend; everything logged is on disk afterwards."""


class ConsoleBackend:
    """Logs to the logger forge_ptq.metrics, in the client: one line per key."""

    def __init__(self, **options: Any) -> None:
        if options:
            raise ValueError(f"metric_logging.console: unknown {sorted(options)}")

    async def start(self) -> None:
        """Nothing to open."""

    async def log(self, step: int | None, values: dict[str, float]) -> None:
        """One record per step."""
        lines = "".join(f"\n  {key}: {value:.6g}" for key, value in values.items())
        console.info("step %s%s", "-" if step is None else step, lines)

    async def finish(self) -> None:
        """Nothing to close."""


class WandbWriter(ForgeActor):
    """Holds the wandb run, in a process of the group `light`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.init_args = options
        self.run: Any = None

    @endpoint
    async def setup(self) -> None:
        """Opens the run; `options` are wandb.init's own (project, group, mode, dir, id, ...)."""
        import wandb

        settings = wandb.Settings(silent=True, console="off")
        self.run = wandb.init(settings=settings, **self.init_args)

    @endpoint
    async def log(self, step: int | None, values: dict[str, float]) -> None:
        """Writes values under wandb's step."""
        self.run.log(values, step=step)

    @endpoint
    async def describe(self) -> dict[str, str]:
        """Id, name and directory of the run."""
        return {"id": self.run.id, "name": self.run.name or "", "dir": self.run.dir}

    @endpoint
    async def finish(self) -> None:
        """Closes the run."""
        self.run.finish()


class WandbBackend:
    """Hands values to a WandbWriter. Any argument of wandb.init is an option."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.writer: Any = None

    async def start(self) -> None:
        """Spawns the writer. Raises what wandb.init raises."""
        writer = WandbWriter.options(colocate=WANDB_GROUP, request_timeout_s=WANDB_TIMEOUT_S)
        self.writer = await writer.as_actor(self.options)

    async def log(self, step: int | None, values: dict[str, float]) -> None:
        """Writes values."""
        await self.writer.log.call_one(step, values)

    async def finish(self) -> None:
        """Closes the run and ends the writer."""
        await self.writer.finish.call_one()
        await WandbWriter.shutdown(self.writer)


BACKENDS: dict[str, Any] = {"console": ConsoleBackend, "wandb": WandbBackend}


def make_backend(name: str, options: dict[str, Any]) -> tuple[str, Backend]:
    """Logging mode and backend from one entry of `metric_logging`; ValueError names the key."""
    if name not in BACKENDS:
        raise ValueError(f"metric_logging.{name}: expected one of {sorted(BACKENDS)}")
    options = dict(options)
    mode = getattr(options.get("logging_mode"), "value", options.get("logging_mode"))
    options.pop("logging_mode", None)
    options.pop("per_rank_share_run", None)  # all ranks always share the run here
    if mode is None:
        mode = "global_reduce"
    if mode not in LOGGING_MODES:
        raise ValueError(
            f"metric_logging.{name}.logging_mode = {mode!r}: expected one of {LOGGING_MODES}"
        )
    return mode, BACKENDS[name](**options)
