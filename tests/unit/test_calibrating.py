"""A calibration's course over doubles of crew, merger and store: what it makes of failures."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_ptq import runtime, store_stats
from forge_ptq.config import PTQConfig
from forge_ptq.numerics.calibration import Calibration, CalibrationFormatError
from forge_ptq.numerics.stats import measure
from forge_ptq.numerics.stats_table import Layout
from forge_ptq.services.calibrating import CalibrationError, asked_plan, misfit
from forge_ptq.services.crew import FleetError
from forge_ptq.services.fleet import QuantizerFleet
from forge_ptq.services.fleet_parts import record_of
from forge_ptq.services.policy_batches import make_batches
from forge_ptq.services.round import Assignment, Item, WorkRound
from forge_ptq.services.work import Observe, PlanDone, ShareDone
from forge_ptq.store_io import StoreError
from forge_ptq.store_stats import ShareKey
from tests.integration.ptq_support import random_rollouts

LAYERS = {"a": "int8_static", "b": "bf16"}
STATS = {"a": measure(torch.ones(2, 3)), "b": measure(torch.ones(2, 5))}
ROLLOUTS = random_rollouts(12)


class Fleet(QuantizerFleet):
    """A fleet whose rounds are held here: every item is done but those that are to be missing."""

    def __init__(self, replicas: int = 2) -> None:
        cfg = PTQConfig()
        cfg.smoothing.enabled = False
        cfg.merge.deadline_s = 0.2
        cfg.calibration.batch_tokens = 64
        merger = SimpleNamespace(merge=SimpleNamespace(call_one=self._merge))
        super().__init__(cfg, SimpleNamespace(size=self._size), merger)  # type: ignore[arg-type]
        self.replicas = replicas
        self.missing: set[str] = set()
        self.tokens = 7
        self.held: list[tuple[str, list[Item]]] = []
        self.faults: dict[str, Any] = {}

    async def _size(self) -> int:
        return self.replicas

    async def _merge(self, *args: Any) -> dict[str, str]:
        if self.faults.get("merge") == "hang":
            await asyncio.sleep(60)
        return {}

    async def hold(self, kind: str, items: Any, deadline_s: float) -> Any:
        self.held.append((kind, list(items)))
        if kind in self.faults:
            raise self.faults[kind]
        round_ = WorkRound(items, 1.0, 10.0, 0.0)
        for number in range(len(items)):
            claim = round_.claim(f"r-{number}", 0.0)
            assert isinstance(claim, Assignment)
            work, name = claim.item.work, claim.item.id
            done: Any = PlanDone(LAYERS, {"a": 1.0, "b": 1.0}, None)
            if isinstance(work, Observe):
                key = ShareKey(work.round, work.pass_, work.share, len(work.batches), 0)
                done = ShareDone(key, self.tokens, 0)
            if name not in self.missing:
                round_.finish(f"r-{number}", name, done, 1.0)
        return SimpleNamespace(outcome=round_.outcome(10.0))


class Store:
    """Doubles of what a calibration asks of store_stats."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.faults: dict[str, Exception] = {}
        answers = {"claim_round": 4, "get_merged": STATS, "calibration_rounds": [3]}
        names = (*answers, "drop_shares", "drop_rounds", "put_calibration", "get_calibration")
        for name in names:
            monkeypatch.setattr(store_stats, name, self._call(name, answers.get(name)))

    def _call(self, name: str, answer: Any) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            self.log.append((name, *args))
            if name in self.faults:
                raise self.faults[name]
            return answer

        return call

    def calls(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.log if call[0] == name]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(monkeypatch)


async def test_no_share_is_empty_so_the_quorum_counts_what_holds_tokens(store: Store) -> None:
    one_batch = ROLLOUTS[:1]
    assert len(make_batches(one_batch, 64)) == 1
    fleet = Fleet(replicas=9)  # 7 shares, if there were batches for them
    await fleet.calibrate(1, one_batch)
    assert [len(items) for kind, items in fleet.held if kind == "observe-1"] == [1]
    fleet.missing = {"share-0"}
    with pytest.raises(CalibrationError, match="0 of 1 shares"):
        await fleet.calibrate(1, one_batch)


async def test_a_calibration_without_a_token_is_none(store: Store) -> None:
    fleet = Fleet()
    fleet.tokens = 0
    with pytest.raises(CalibrationError, match="hold no token"):
        await fleet.calibrate(1, ROLLOUTS)
    assert fleet.calibration is None
    assert store.calls("put_calibration") == []


async def test_the_manifest_tells_how_the_calibration_was_made_not_what_is_configured_now(
    store: Store,
) -> None:
    fleet = Fleet()
    fleet.cfg.calibration.range = "mse"
    fleet.cfg.plan.mode, fleet.cfg.plan.budget = "auto", 0.02
    made = await fleet.calibrate(1, ROLLOUTS, ROLLOUTS[:2])
    fleet.cfg.calibration.range, fleet.cfg.plan.mode = "kl", "fixed"
    record = record_of(made, made.layers)
    assert record is not None
    assert (record.range_method, record.budget) == ("mse", 0.02)
    assert made.asked == {"mode": "auto", "overrides": {}, "budget": 0.02}


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        ("claim_round", StoreError("the store is gone")),
        ("get_merged", StoreError("the store is gone")),
        ("put_calibration", StoreError("the store is gone")),
        ("put_calibration", ValueError("a: its calibrated range is inf")),
        ("observe-1", FleetError("no replica can be asked")),
        ("plan", FleetError("no replica can be asked")),
    ],
)
async def test_whatever_fails_is_a_calibration_error(
    store: Store, where: str, fault: Exception
) -> None:
    fleet = Fleet()
    (store.faults if where in dir(store_stats) else fleet.faults)[where] = fault
    with pytest.raises(CalibrationError, match=str(fault)):
        await fleet.calibrate(1, ROLLOUTS)
    assert fleet.calibration is None


async def test_what_cannot_be_deleted_does_not_cost_the_calibration(store: Store) -> None:
    fleet = Fleet()
    store.faults["drop_shares"] = store.faults["drop_rounds"] = StoreError("busy")
    made = await fleet.calibrate(1, ROLLOUTS)
    assert fleet.calibration is made
    assert store.calls("put_calibration") == [(made,)]


@pytest.mark.parametrize("failing", [False, True])
async def test_shares_go_once_they_are_merged_or_lost(store: Store, failing: bool) -> None:
    fleet = Fleet()
    if failing:
        fleet.missing = {"share-0"}
        with pytest.raises(CalibrationError):
            await fleet.calibrate(1, ROLLOUTS)
    else:
        await fleet.calibrate(1, ROLLOUTS)
    assert store.calls("drop_shares") == [(4, 1)]
    assert store.calls("drop_rounds") == [(4, fleet.cfg.calibration.keep_versions)]


async def test_a_merger_that_hangs_is_killed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []

    async def kill_local(handle: Any) -> None:
        killed.append(handle)

    monkeypatch.setattr(runtime, "kill_local", kill_local)
    fleet = Fleet()
    await fleet.calibrate(1, ROLLOUTS)
    assert killed == []
    fleet.faults["merge"] = "hang"
    with pytest.raises(CalibrationError, match=r"merging failed: no answer to merge within 0\.2 s"):
        await fleet.calibrate(1, ROLLOUTS)
    assert killed == [fleet.merger]


def stored(**changes: Any) -> Calibration:
    made = Calibration(3, 1, LAYERS, {}, stats=STATS, asked=asked_plan(PTQConfig().plan))
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("changes", "plan", "reason"),
    [
        ({}, {}, None),
        ({"stats": {}}, {}, None),
        ({}, {"budget": 0.01}, None),  # a fixed plan has none
        ({"layers": {"a": "bf16"}}, {}, r"not the model's \(b\)"),
        ({"stats": {"a": STATS["b"], "b": STATS["b"]}}, {}, "not as wide"),
        ({}, {"default": "int8_static"}, "made for the plan"),
        ({}, {"overrides": {"*.b": "bf16"}}, "made for the plan"),
        ({}, {"mode": "auto"}, "made for the plan"),
    ],
)
def test_a_calibration_of_another_model_or_plan_is_told(
    changes: Any, plan: Any, reason: str | None
) -> None:
    configured = replace(PTQConfig().plan, **plan)
    found = misfit(stored(**changes), Layout.of(STATS), LAYERS, configured)
    assert found is None if reason is None else re.search(reason, found or "")


async def status() -> Any:
    return SimpleNamespace(layers=LAYERS, layout=Layout.of(STATS))


async def silent() -> Any:
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("found", "answer", "used"),
    [
        (stored(), status, True),
        (stored(layers={"a": "bf16"}), status, False),
        (CalibrationFormatError("calibration of schema 1"), status, False),
        (StoreError("no such calibration"), status, False),
        (stored(), silent, False),
    ],
)
async def test_only_a_fitting_calibration_is_restored_and_nothing_stops_the_launch(
    store: Store, monkeypatch: pytest.MonkeyPatch, found: Any, answer: Any, used: bool
) -> None:
    async def get_calibration(round_: int) -> Calibration:
        assert round_ == 3
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(store_stats, "get_calibration", get_calibration)
    cfg = PTQConfig()
    cfg.merge.deadline_s = 0.2
    quantizer = SimpleNamespace(status=SimpleNamespace(call_one=answer))
    fleet = await QuantizerFleet.launch(cfg, quantizer, None, None)
    assert (fleet.calibration is found) == used
