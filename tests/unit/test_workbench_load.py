"""Workbench.load: a rank pulls what it holds of a version, and nothing of one that does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from forge_ptq import store
from forge_ptq.numerics.plan import QuantPlan
from forge_ptq.services import policy_load
from forge_ptq.services.policy_copy import PolicyCopy
from forge_ptq.services.ranks import Ranks
from forge_ptq.services.workbench import Workbench
from forge_ptq.store_tensors import StoredTensor
from tests.models import tiny_model

CUT = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def bench(monkeypatch) -> Workbench:
    """Of a rank that holds the last 3 columns of CUT, with a store that has version 4."""
    policy = PolicyCopy(tiny_model("qwen3"), QuantPlan.from_config("int8_dynamic"))
    whole = {name: p.detach() + 1 for name, p in policy.parameters.items()}
    rows, columns = whole[CUT].shape
    part = (slice(0, rows), slice(columns - 3, columns))
    local = torch.nn.Parameter(torch.zeros(rows, 3), requires_grad=False)

    def assign(parameter: torch.Tensor, value: torch.Tensor, *, part: bool) -> None:
        target = local if parameter is policy.parameters[CUT] else parameter
        target.copy_(value)

    monkeypatch.setattr(
        policy_load, "held", lambda p: part if p is policy.parameters[CUT] else None
    )
    monkeypatch.setattr(policy_load, "assign", assign)

    async def weight_specs(version: int) -> dict[str, StoredTensor]:
        assert version == 4
        return {name: StoredTensor.of(tensor) for name, tensor in whole.items()}

    async def get_weights(version: int, slices: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        assert version == 4
        fetched.append(dict(slices))
        return {n: t[slices[n]] if n in slices else t for n, t in whole.items()}

    async def run(work: Any) -> Any:
        return work()

    fetched: list[dict[str, Any]] = []
    monkeypatch.setattr(store, "weight_specs", weight_specs)
    monkeypatch.setattr(store, "get_weights", get_weights)
    bench = Workbench(policy, Ranks(), "host:1", run)
    vars(bench).update(fetched=fetched, whole=whole, local=local, part=part)
    return bench


async def test_only_the_part_held_is_asked_for(bench: Any) -> None:
    await bench.load(4)
    assert bench.fetched == [{CUT: bench.part}]
    assert torch.equal(bench.local, bench.whole[CUT][:, -3:])
    other = CUT.replace("down", "up")
    assert torch.equal(bench.policy.parameters[other], bench.whole[other])
    assert bench.policy.version == 4
    await bench.load(4)
    assert len(bench.fetched) == 1  # it is there


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda whole: whole.pop(CUT), r"policy version 4: .*down_proj\.weight is missing"),
        (lambda whole: whole.update({CUT: whole[CUT][:, -3:]}), r"down_proj\.weight has shape"),
    ],
    ids=["missing", "a part for the whole"],
)
async def test_nothing_is_fetched_of_a_version_that_does_not_fit(
    bench: Any, change: Any, message: str
) -> None:
    change(bench.whole)
    with pytest.raises(ValueError, match=message):
        await bench.load(4)
    assert bench.fetched == []
    assert bench.policy.version is None
