"""Workbench: a replica's policy and tools, and how each kind of work is carried out with them.

Coroutines here run in the actor's event loop; everything that touches tensors goes to its worker
thread (``Workbench.run``), so that the actor goes on beating. On a tensor-parallel replica every
rank carries the same work out at the same time, in the same order of collectives.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from forge_ptq import store, store_stats
from forge_ptq.manifest import describe_tensor
from forge_ptq.numerics.calibration import Calibration
from forge_ptq.numerics.schemes import QuantizationError
from forge_ptq.numerics.stats import ActivationStats
from forge_ptq.numerics.stats_table import Layout, pack, unpack
from forge_ptq.services.code_flips import CodeFlips
from forge_ptq.services.ladder import overlaid
from forge_ptq.services.planning import choose_plan, rank_moves
from forge_ptq.services.policy_copy import PolicyCopy
from forge_ptq.services.policy_tp import observing
from forge_ptq.services.ranks import Ranks
from forge_ptq.services.work import (
    Done,
    Observe,
    PartDone,
    Plan,
    PlanDone,
    Quantize,
    Rank,
    RankDone,
    Reference,
    ReferenceDone,
    ShareDone,
    Smooth,
    SmoothDone,
    Work,
)
from forge_ptq.services.workbench_stats import is_static, joined, part_of, tokens_of
from forge_ptq.store_stats import Mark, ShareKey

T = TypeVar("T")
Stats = dict[str, ActivationStats]


class Run(Protocol):
    """Runs a function in the worker thread."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


class DroppedError(Exception):
    """Nobody needs the item any more: another replica was faster, or the round is over."""


class AgreedError(RuntimeError):
    """Raised on all ranks of a replica at the same point: none of them waits for another one."""


@dataclass
class Progress:
    """How far an item has come; beats report it."""

    ranks: Ranks
    done: int = 0
    dropped: threading.Event = field(default_factory=threading.Event)

    def step(self, done: int) -> None:
        """Called in the worker thread after each batch. Raises DroppedError on all ranks alike."""
        self.done = done
        if self.ranks.broadcast(self.dropped.is_set()):
            raise DroppedError


class Workbench:
    """What one process of a replica works with. name: the replica's id."""

    def __init__(self, policy: PolicyCopy, ranks: Ranks, name: str, run: Run) -> None:
        self.policy = policy
        self.ranks = ranks
        self.name = name
        self.run = run
        self._calibration: Calibration | None = None
        self._flips = CodeFlips()

    @property
    def layout(self) -> Layout:
        """All sites with their widths, the same on every rank of every replica."""
        shapes = self.policy.shapes
        return Layout(tuple((site, shapes[f"{site}.weight"][1]) for site in self.policy.sites))

    async def load(self, version: int) -> None:
        """Pull a policy version from the store unless it is there: of sharded weights this rank's
        part only."""
        if self.policy.version != version:
            specs = await store.weight_specs(version)
            shapes = {name: spec.shape for name, spec in specs.items()}
            slices = self.policy.intake.slices(version, shapes)
            weights = await store.get_weights(version, slices)
            await self.run(lambda: self.policy.load(version, weights, parts=True))

    async def carry_out(self, work: Work, attempt: int, progress: Progress) -> Done:
        """Do one item. Raises what goes wrong, or DroppedError."""
        await self.load(work.version)
        match work:
            case Observe():
                return await self._observe(work, attempt, progress)
            case Smooth():
                return await self._smooth(work)
            case Plan():
                return await self._plan(work, progress)
            case Quantize():
                return await self._quantize(work, attempt)
            case Rank():
                return await self._rank(work)
            case Reference():
                return await self._reference(work)

    # calibration

    async def _observe(self, work: Observe, attempt: int, progress: Progress) -> ShareDone:
        layout = self.layout
        found = await self._checkpoint(work, layout)
        total: Stats = {}
        done = 0
        if found is not None:
            key, mark = found
            if key.batches == len(work.batches):
                return ShareDone(key, mark.tokens, key.batches)
            total, done = await self._resume(key, mark), key.batches
        resumed = done
        while True:
            chunk = work.batches[done : done + work.checkpoint_every]
            before = done

            def measure(chunk: Sequence[Any] = chunk, before: int = before) -> Stats:
                return self.policy.observe(
                    chunk, work.shift, lambda number: progress.step(before + number)
                )

            fresh = await self.run(measure)
            total = {site: total[site].merge(fresh[site]) for site in fresh} if total else fresh
            done += len(chunk)
            await self.run(lambda total=total: self._check(total))  # type: ignore[misc]
            key = ShareKey(work.round, work.pass_, work.share, done, attempt)
            await self._put(key, layout, total)
            if done >= len(work.batches):
                break
            if self.ranks.rank == 0:
                await store_stats.drop_checkpoints(
                    work.round, work.pass_, work.share, attempt, work.keep
                )
        # Only when every rank's slices and marks are in place is the share done.
        await self.run(lambda: self.ranks.gather(True))
        return ShareDone(key, tokens_of(total), resumed)

    async def _checkpoint(self, work: Observe, layout: Layout) -> tuple[ShareKey, Mark] | None:
        """The furthest checkpoint of the share that fits this model."""
        found = None
        if self.ranks.rank == 0:
            found = await store_stats.find_checkpoint(work.round, work.pass_, work.share)
        found = await self.run(lambda: self.ranks.broadcast(found))
        return found if found is not None and found[1].layout == layout else None

    async def _resume(self, key: ShareKey, mark: Mark) -> Stats:
        """This rank's part of a checkpoint."""
        whole = unpack(await store_stats.get_stats(key, mark), mark.layout)
        rank, size = self.ranks.rank, self.ranks.size
        return {site: part_of(stats, rank, size) for site, stats in whole.items()}

    def _check(self, stats: Stats) -> None:
        """AgreedError unless all ranks saw finite activations only.

        Nothing is stored then: whoever takes the share over must not go on from there. It may be
        this replica that is broken.
        """
        bad = {site: stat.non_finite for site, stat in stats.items() if stat.non_finite}
        found = {s: n for each in self.ranks.gather(bad) for s, n in each.items()}
        for site in stats:
            if site in found:
                raise AgreedError(f"the input of {site} holds NaN or infinite values")

    async def _put(self, key: ShareKey, layout: Layout, stats: Stats) -> None:
        rank, size = self.ranks.rank, self.ranks.size
        table = await self.run(lambda: pack(stats, layout, rank, size))
        await store_stats.put_stats(
            key, table, Mark(tokens_of(stats), self.name, size, layout), rank
        )

    async def _smooth(self, work: Smooth) -> SmoothDone:
        stats = await store_stats.get_merged(work.round, work.pass_)
        shift, alpha = await self.run(
            lambda: self.policy.smooth(stats, work.alpha, down_proj=work.down_proj)
        )
        return SmoothDone(shift, alpha)

    async def _plan(self, work: Plan, progress: Progress) -> PlanDone:
        stats = await store_stats.get_merged(work.round, work.pass_)
        return await self.run(
            lambda: choose_plan(self.policy, work, stats, progress.step, self.ranks)
        )

    # artifacts and scores

    async def calibration(self, round_: int) -> Calibration:
        """A stored calibration; the last one used is kept."""
        if self._calibration is None or self._calibration.round != round_:
            self._calibration = await store_stats.get_calibration(round_)
        return self._calibration

    async def _quantize(self, work: Quantize, attempt: int) -> PartDone:
        policy = self.policy
        calibration = None if work.calibration is None else await self.calibration(work.calibration)
        if work.scheme is not None:
            asked = policy.plan.override_all(work.scheme).resolve(policy.linears)
        else:
            asked = dict(calibration.layers if calibration else policy.layers)
        wanted = overlaid(asked, work.overlay) if work.scheme is None else asked
        if calibration is None and "int8_static" in wanted.values():
            raise ValueError("the plan has int8_static layers: calibrate before quantize")
        errors: dict[str, float] = {}

        def make() -> Any:
            try:
                tensors, used, notes = policy.quantize(
                    wanted,
                    calibration,
                    names=policy.shares(work.parts)[work.part],
                    corrupt=work.corrupt,
                    errors=errors,
                )
            except QuantizationError as error:  # about the whole tensor, which every rank has
                raise AgreedError(str(error)) from error
            flips = self._flips.compare(work.version, tensors)
            return tensors, {n: describe_tensor(t) for n, t in tensors.items()}, used, notes, flips

        tensors, specs, used, notes, flips = await self.run(make)
        name = f"{work.part:04d}-a{attempt}"
        if self.ranks.rank == 0:
            part = await store.put_artifact_part(work.artifact_id, name, tensors)
        else:
            part = store.ArtifactPart(name, {}, 0)
        part_asked = {layer: asked[layer] for layer in used}
        demoted = {
            name: f"{wanted[name]} instead of {asked[name]}: demoted"
            for name in used
            if wanted[name] != asked[name]
        }
        return PartDone(
            part, specs, part_asked, used, demoted | notes, policy.architecture, errors, *flips
        )

    async def _rank(self, work: Rank) -> RankDone:
        calibration = None if work.calibration is None else await self.calibration(work.calibration)
        return RankDone(await self.run(lambda: rank_moves(self.policy, calibration, work.overlay)))

    async def _reference(self, work: Reference) -> ReferenceDone:
        policy = self.policy
        calibration = None if work.calibration is None else await self.calibration(work.calibration)
        static = (
            [site for site, members in policy.sites.items() if is_static(calibration, members)]
            if calibration is not None
            else []
        )
        if calibration is None or not static:
            return ReferenceDone(await self.run(lambda: policy.reference(work.rollouts)), None, ())
        shift = {site: s for site, s in calibration.shift.items() if site in static}
        sites = tuple((site, width) for site, width in self.layout.sites if site in static)

        def score() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
            rank, size = self.ranks.rank, self.ranks.size
            with observing(policy.model, static, shift) as observer:
                hidden = policy.reference(work.rollouts, observer)
                table = pack(observer.take(), Layout(sites), rank, size)
            return hidden, joined(self.ranks.gather(table))

        hidden, table = await self.run(score)
        return ReferenceDone(hidden, table, sites)
