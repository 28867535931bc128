"""Configuration and errors of the runtime. Light: standard library only.

The configuration classes keep torchforge's field names; fields below the line "extensions" are
ours. Every error says which key, value or process it is about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class ServiceUnavailable(RuntimeError):
    """No healthy replica, and none came back within `unavailable_timeout_s`."""


class RequestTimeout(TimeoutError):
    """A request passed its deadline; the message names endpoint and replica (or actor)."""


class QueueFull(RuntimeError):
    """The service already holds `max_queued_requests` requests that no replica has taken yet."""


class ActorDied(RuntimeError):
    """The process that should have answered is gone; the message names actor, endpoint and pid."""


class Launcher(Enum):
    LOCAL = "local"
    SLURM = "slurm"
    MAST = "mast"


def _require(ok: bool, owner: str, key: str, value: Any, expected: str) -> None:
    if not ok:
        raise ValueError(f"{owner}.{key} = {value!r}: expected {expected}")


def _check_placement(owner: str, cfg: ProcessConfig | ServiceConfig) -> None:
    _require(isinstance(cfg.procs, int) and cfg.procs >= 1, owner, "procs", cfg.procs, "int >= 1")
    hosts_ok = cfg.hosts is None or (isinstance(cfg.hosts, int) and cfg.hosts >= 1)
    _require(hosts_ok, owner, "hosts", cfg.hosts, "null (this machine) or int >= 1")
    timeout_ok = cfg.request_timeout_s > 0
    _require(timeout_ok, owner, "request_timeout_s", cfg.request_timeout_s, "seconds > 0")
    env_ok = all(isinstance(k, str) and isinstance(v, str) for k, v in cfg.env.items())
    _require(env_ok, owner, "env", cfg.env, "str -> str")
    if cfg.colocate is not None:
        alone = cfg.procs == 1 and not cfg.with_gpus and cfg.hosts is None
        _require(alone, owner, "colocate", cfg.colocate, "procs=1, no GPUs, no hosts")


@dataclass
class ProcessConfig:
    """Placement of one actor: `procs` processes per host, on this machine or on `hosts` hosts."""

    procs: int = 1
    with_gpus: bool = False
    hosts: int | None = None
    mesh_name: str | None = None
    # extensions
    env: dict[str, str] = field(default_factory=dict)
    """Environment of the spawned processes, in place before Python imports anything."""
    colocate: str | None = None
    """Actors that name the same group share one process."""
    request_timeout_s: float = 3600.0
    """Deadline of each call to the actor, seconds."""
    spawn_timeout_s: float = 600.0
    """Deadline of process start plus setup(), seconds."""

    def __post_init__(self) -> None:
        _check_placement("ProcessConfig", self)


@dataclass
class ServiceConfig:
    """Placement and limits of a service: `num_replicas` times the placement of one actor."""

    procs: int = 1
    num_replicas: int = 1
    with_gpus: bool = False
    hosts: int | None = None
    health_poll_rate: float = 0.2
    """Seconds between two looks at the replicas' health (deaths are noticed at once)."""
    replica_max_concurrent_requests: int = 10
    """Requests that one replica works on at a time; more wait in its queue."""
    return_first_rank_result: bool = True
    """Unwrap a replica's ValueMesh to its first rank's result."""
    mesh_name: str | None = None
    # extensions
    env: dict[str, str] = field(default_factory=dict)
    colocate: str | None = None
    request_timeout_s: float = 600.0
    """Deadline of one request, from its call to its result, retries included; seconds."""
    spawn_timeout_s: float = 600.0
    max_queued_requests: int = 1024
    """Requests of the whole service that may wait for a replica; more raise QueueFull."""
    unavailable_timeout_s: float = 60.0
    """How long a request waits for a replica to come back when none is healthy; seconds."""
    max_attempts: int = 3
    """Replicas that may die under one request before its caller is told."""
    routing: str = "round_robin"
    """round_robin | least_loaded, for requests outside of sessions."""
    restart_on_timeout: bool = False
    """Kill and respawn a replica whose request passed its deadline (it may hang)."""

    def __post_init__(self) -> None:
        name = "ServiceConfig"
        _check_placement(name, self)
        for key in (
            "num_replicas",
            "replica_max_concurrent_requests",
            "max_queued_requests",
            "max_attempts",
        ):
            value = getattr(self, key)
            _require(isinstance(value, int) and value >= 1, name, key, value, "int >= 1")
        for key in ("health_poll_rate", "unavailable_timeout_s", "spawn_timeout_s"):
            value = getattr(self, key)
            _require(value > 0, name, key, value, "seconds > 0")
        routes = ("round_robin", "least_loaded")
        _require(self.routing in routes, name, "routing", self.routing, " | ".join(routes))

    def to_process_config(self) -> ProcessConfig:
        """Placement of one replica."""
        return ProcessConfig(
            procs=self.procs,
            with_gpus=self.with_gpus,
            hosts=self.hosts,
            mesh_name=self.mesh_name,
            env=dict(self.env),
            colocate=self.colocate,
            request_timeout_s=self.request_timeout_s,
            spawn_timeout_s=self.spawn_timeout_s,
        )


@dataclass
class LauncherConfig:
    """How hosts are obtained: `local` (this machine only), `slurm`, or `mast`."""

    launcher: Launcher | str = Launcher.LOCAL
    job_name: str = ""
    services: dict[str, ServiceConfig] = field(default_factory=dict)
    actors: dict[str, ProcessConfig] = field(default_factory=dict)
    # extensions
    scheduler_args: dict[str, Any] = field(default_factory=dict)
    """Passed to the scheduler's job (slurm: partition, time_limit, gpus_per_node, mem, ...)."""
    transport: str = "tcp"
    """How remote hosts reach this client: tcp (by its hostname), or an address tcp://IP:PORT."""

    def __post_init__(self) -> None:
        if isinstance(self.launcher, str):
            names = [launcher.value for launcher in Launcher]
            _require(
                self.launcher in names,
                "LauncherConfig",
                "launcher",
                self.launcher,
                " | ".join(names),
            )
            self.launcher = Launcher(self.launcher)


@dataclass
class ProvisionerConfig:
    """Configuration of `init_provisioner`."""

    launcher_config: LauncherConfig = field(default_factory=LauncherConfig)
