"""Workbench: what it raises must not end a whole tensor-parallel group without need."""

from typing import Any

import pytest

from forge_ptq.numerics.plan import QuantPlan
from forge_ptq.services.policy_copy import PolicyCopy
from forge_ptq.services.ranks import Ranks
from forge_ptq.services.work import Quantize
from forge_ptq.services.workbench import AgreedError, Progress, Workbench
from tests.models import tiny_model


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
async def test_broken_weights_are_seen_by_all_ranks_alike(name: str) -> None:
    async def run(work: Any) -> Any:
        return work()

    policy = PolicyCopy(tiny_model("qwen3"), QuantPlan.from_config("int8_dynamic"))
    policy.version = 5
    policy.parameters[name].view(-1)[3] = float("nan")
    bench = Workbench(policy, Ranks(), "host:1", run)
    work = Quantize(5, "v5-x", part=0, parts=1, scheme=None, calibration=None)
    with pytest.raises(AgreedError, match=name.removesuffix(".weight")):
        await bench.carry_out(work, 0, Progress(bench.ranks))
