"""Blocks of `services`, `actors` and `provisioner`: who runs where, on how many processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .block import Block, Positive, PositiveInt


@dataclass(kw_only=True)
class ProcessOptions(Block):
    """Processes of one actor."""

    procs: PositiveInt = 1
    """Processes (ranks)."""

    hosts: PositiveInt | None = None
    """Remote hosts; null runs on this machine."""

    with_gpus: bool = False
    """One GPU per process."""

    mesh_name: str | None = None
    """Name of the process mesh, also of its log file. Defaults to the key of the block."""

    env: dict[str, str] = field(default_factory=dict)
    """Environment of the processes, set before anything heavy is imported."""

    colocate: str | None = None
    """Actors that name the same group share one process; null gives an own one."""

    request_timeout_s: Positive = 3600.0
    """Deadline of one call, in seconds."""

    spawn_timeout_s: Positive = 600.0
    """Deadline for start and set-up of the processes, in seconds."""


@dataclass(kw_only=True)
class ServiceOptions(ProcessOptions):
    """Processes of one service: the same, times replicas."""

    request_timeout_s: Positive = 600.0
    """Deadline of one request, retries on other replicas included, in seconds."""

    num_replicas: PositiveInt = 1
    """Replicas, each of `procs` processes."""

    health_poll_rate: Positive = 0.2
    """Seconds between two looks at the replicas' health."""

    replica_max_concurrent_requests: PositiveInt = 10
    """Requests in flight per replica; more wait in its queue."""

    max_queued_requests: PositiveInt = 1024
    """Requests of the whole service that may wait; more are refused."""

    max_attempts: PositiveInt = 3
    """Replicas that may die under one request before its caller is told."""

    routing: Literal["round_robin", "least_loaded"] = "round_robin"
    """Which replica takes the next request, outside of sessions."""

    restart_on_timeout: bool = False
    """Kill and respawn a replica whose request passed its deadline."""

    return_first_rank_result: bool = True
    """Calls return rank 0's result instead of one per rank."""

    unavailable_timeout_s: Positive = 60.0
    """Seconds a call waits for a dead service's replacement before it fails."""


@dataclass(kw_only=True)
class ServicesConfig(Block):
    """Placement of the services."""

    policy: ServiceOptions = field(default_factory=ServiceOptions)
    """The generator."""

    ref_model: ServiceOptions = field(default_factory=ServiceOptions)
    """The reference model."""

    reward_actor: ServiceOptions = field(default_factory=ServiceOptions)
    """The rewards."""

    quantizer: ServiceOptions = field(default_factory=ServiceOptions)
    """The quantizer; each replica is one process, or `procs` tensor-parallel ones."""

    stats_merger: ServiceOptions = field(default_factory=ServiceOptions)
    """The merger of statistics; each of its `procs` reads and merges a slice of the layers."""


@dataclass(kw_only=True)
class ActorsConfig(Block):
    """Placement of the actors."""

    dataset: ProcessOptions = field(default_factory=ProcessOptions)
    """The prompts."""

    trainer: ProcessOptions = field(default_factory=ProcessOptions)
    """The trainer; `procs` is the product of its parallelism degrees."""

    replay_buffer: ProcessOptions = field(default_factory=ProcessOptions)
    """The replay buffer."""

    compute_advantages: ProcessOptions = field(default_factory=ProcessOptions)
    """The group advantages."""

    coordinator: ProcessOptions = field(default_factory=ProcessOptions)
    """The coordinator of the quantizer's replicas."""


@dataclass(kw_only=True)
class ProvisionerConfig(Block):
    """Where remote hosts come from."""

    launcher: Literal["slurm", "mast"] = "slurm"
    """Scheduler that hands out hosts."""

    job_name: str = ""
    """Name of the job there."""
