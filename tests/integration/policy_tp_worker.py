"""One tensor-parallel rank of test_policy_tp: loads, observes, scores, quantizes, saves it all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from forge_ptq.numerics.calibration import Calibration
from forge_ptq.numerics.plan import QuantPlan
from forge_ptq.numerics.stats import measure
from forge_ptq.numerics.stats_table import pack
from forge_ptq.services import planning
from forge_ptq.services.policy_copy import PolicyCopy, build_model, make_batches
from forge_ptq.services.policy_tp import shard
from forge_ptq.services.ranks import Ranks
from forge_ptq.services.sampler import Rollout
from forge_ptq.services.work import Plan, PlanDone

PLAN = QuantPlan.from_config("int8_static", {"*.1.mlp.down_proj": "int8_dynamic"})


def rollouts() -> list[Rollout]:
    """Sequences of odd lengths, so that batches are padded."""
    generator = torch.Generator().manual_seed(4)
    return [
        Rollout(torch.randint(4, 64, (n,), generator=generator).tolist(), n // 2, 0.0, 0, "g")
        for n in (3, 17, 9, 30)
    ]


def shifts(policy: PolicyCopy) -> dict[str, torch.Tensor]:
    """Some smoothing of every site that allows it, grouped heads included."""
    found = {}
    for name, site in policy.smoothing_sites(down_proj=True).items():
        width = policy.shapes[f"{name}.weight"][1]
        block = site.head_dim * site.repeat
        index = torch.arange(width)
        factor = index if site.repeat == 1 else index // block * 7 + index % site.head_dim
        found[name] = (factor % 5 - 2).to(torch.int8)
    return found


def plan(policy: PolicyCopy, ranks: Ranks, budget: float = 0.05) -> PlanDone:
    """An auto plan; what ranks other than the first measure is wrong, and they must not care."""
    generator = torch.Generator().manual_seed(7)
    stats = {
        site: measure(torch.randn(50, policy.shapes[f"{site}.weight"][1], generator=generator))
        for site in policy.sites
    }
    work = Plan(
        version=1, round=1, pass_=1, shift={}, method="absmax", percentile=99.99, auto=True,
        budget=budget, max_evaluations=5, rollouts=rollouts(),
    )  # fmt: skip
    rise, groups = planning.rise, policy.groups
    if ranks.rank > 0:
        planning.rise = lambda log_rise: 0.0
        policy.groups = lambda *args: groups(*args)[::-1]  # type: ignore[method-assign]
    try:
        return planning.choose_plan(policy, work, stats, lambda done: None, ranks)
    finally:
        planning.rise = rise
        policy.groups = groups  # type: ignore[method-assign]


def job(policy: PolicyCopy, group: Ranks) -> dict[str, Any]:
    """Everything that a replica does with its policy; the same calls on every rank."""
    from forge_ptq.numerics.stats_table import Layout

    rank, ranks, shift = group.rank, group.size, shifts(policy)
    sites = tuple((site, policy.shapes[f"{site}.weight"][1]) for site in policy.sites)
    batches = make_batches(rollouts(), 40)
    raw, smoothed = policy.observe(batches), policy.observe(batches, shift)
    ranges = dict.fromkeys(policy.layers, 3.0)
    calibration = Calibration(
        round=1, policy_version=1, layers=policy.layers, absmax=ranges, shift=shift, stats={},
        tokens=1, contributors=(), dropped=(), predicted_rise=None, alpha={},
    )  # fmt: skip
    tensors, used, _ = policy.quantize(policy.layers, calibration)
    return {
        "raw": pack(raw, Layout(sites), rank, ranks),
        "smoothed": pack(smoothed, Layout(sites), rank, ranks),
        "sites": sites,
        "hidden": policy.reference(rollouts()),
        "kl": policy.evaluate(policy.layers, ranges, shift, rollouts()),
        "tensors": tensors,
        "used": used,
        "plan": vars(plan(policy, group)),
        "slices": {
            name: [(part.start, part.stop) for part in parts]
            for name, parts in policy.intake.slices(1, policy.shapes).items()
        },
    }


def make_policy(model_dir: Path, weights: Mapping[str, torch.Tensor], ranks: int) -> PolicyCopy:
    """Built, sharded and loaded with what this rank keeps of the weights."""
    model = build_model(model_dir)
    shard(model, ranks)
    policy = PolicyCopy(model, PLAN)
    slices = policy.intake.slices(1, {name: tensor.shape for name, tensor in weights.items()})
    parts = {n: t[slices[n]] if n in slices else t for n, t in weights.items()}
    policy.load(1, parts, parts=True)
    return policy


def main(rank: int, ranks: int, port: int, folders: list[str]) -> None:
    """Entry of a spawned process; one folder per architecture."""
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    group = Ranks(rank, ranks)
    group.connect()
    try:
        for folder in map(Path, folders):
            weights = torch.load(folder / "weights.pt", weights_only=True)
            policy = make_policy(folder, weights, ranks)
            torch.save(job(policy, group), folder / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()
