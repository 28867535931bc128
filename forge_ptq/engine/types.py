"""Plain records that cross the engine's border. No vLLM here, torch only for annotations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


class EngineDeadError(RuntimeError):
    """The engine thread has ended after an error; the actor must be respawned."""


class SlotStateError(RuntimeError):
    """A slot operation that the current state of the slots does not allow."""


class SlotMemoryError(RuntimeError):
    """There was not enough memory to fill the idle slot; it is empty again, live serves on."""


class RequestError(ValueError):
    """A generate or probe request that is wrong in itself; nothing was admitted."""


@dataclass
class ProbeSequence:
    """One sequence to score under the idle slot.

    ``token_ids`` is prompt and response together, ``response_start`` (>= 1) the index of the first
    response token. ``reference_hidden`` [R, H], R = len(token_ids) - response_start, holds the
    full-precision policy's final-normed hidden states at positions response_start - 1 .. -2.
    """

    token_ids: list[int]
    response_start: int
    reference_hidden: torch.Tensor | None = None


@dataclass
class ProbeScore:
    """Scores of one sequence, fp32 [R] each; natural logarithms.

    ``logprobs``: of the response tokens under the idle slot. ``reference_logprobs``: of the same
    tokens under the reference hidden states. ``kl``: KL(reference || idle slot) over the whole
    vocabulary. The last two are None where no reference was given.
    """

    logprobs: torch.Tensor
    reference_logprobs: torch.Tensor | None = None
    kl: torch.Tensor | None = None


@dataclass
class StageReport:
    """How an artifact came into the idle slot. Times in seconds.

    ``load_s``: from the store, verified. ``drain_s``: waiting for the slot's last sequences.
    ``fill_s``: from the first layer prepared to the last, live steps in between included.
    ``busy_s``: the engine thread's own time in it. ``resubmitted``: sequences moved to the live
    slot because the drain deadline passed.
    """

    artifact_id: str
    policy_version: int
    slot: int
    bytes: int
    stage_s: float
    load_s: float = 0.0
    drain_s: float = 0.0
    fill_s: float = 0.0
    busy_s: float = 0.0
    resubmitted: int = 0


@dataclass
class CommitReport:
    """A flip. ``pause_s`` is the longest time that admitted sequences waited between two of their
    steps since staging began (since the flip for a rollback); ``step_s_median`` the usual step."""

    artifact_id: str
    policy_version: int
    slot: int
    flip_s: float
    pause_s: float
    step_s_median: float
    draining: int


Role = Literal["", "candidate", "live", "previous", "companion", "retired"]
"""What a filled slot is for. ``candidate``: may become live by a commit, has not served or was
rolled back. ``live``: new requests. ``previous``: was live, rollback goes there. ``companion``: the
live version in full precision, takes the requests that admission gives it, never becomes live.
``retired``: only finishes its sequences, then the slot is free. Empty and filling slots have none.
"""


@dataclass
class SlotInfo:
    """What a slot holds. ``state``: empty, filling, ready.
    ``layers``: HF module name -> scheme of the prepared linear, as it would run. ``damaged``: on
    purpose, by ``damage_live``."""

    artifact_id: str | None = None
    policy_version: int | None = None
    layers: dict[str, str] = field(default_factory=dict)
    state: str = "empty"
    role: Role = ""
    damaged: bool = False
    salt: str = ""
    bytes: int = 0

    @property
    def scheme_tag(self) -> str:
        """The schemes of the linears, most frequent first, such as ``int8_dynamic+bf16``."""
        counts = Counter(self.layers.values())
        return "+".join(sorted(counts, key=lambda name: (-counts[name], name)))


@dataclass
class Sample:
    """One finished sequence as the engine reports it. ``logprobs``: of the sampled distribution.

    ``arm``: live or companion. ``drawn``: the arm was chosen by lot between two open arms, and kept
    to the end: only such sequences may be compared between arms.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    stop_reason: str | None
    policy_version: int
    artifact_id: str
    scheme_tag: str
    slot: int
    arm: str
    drawn: bool
    resubmitted: int
    queue_to_done_s: float
