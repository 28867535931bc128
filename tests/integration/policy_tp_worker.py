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
from forge_ptq.numerics.stats_table import pack
from forge_ptq.services.policy_copy import PolicyCopy, build_model, make_batches
from forge_ptq.services.policy_tp import shard
from forge_ptq.services.sampler import Rollout

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


def job(policy: PolicyCopy, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Everything that a replica does with its policy; the same calls on every rank."""
    from forge_ptq.numerics.stats_table import Layout

    shift = shifts(policy)
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
    }


def make_policy(model_dir: Path, weights: Mapping[str, torch.Tensor], ranks: int) -> PolicyCopy:
    """Built, sharded and loaded."""
    model = build_model(model_dir)
    shard(model, ranks)
    policy = PolicyCopy(model, PLAN)
    policy.load(1, weights)
    return policy


def main(rank: int, ranks: int, port: int, folders: list[str]) -> None:
    """Entry of a spawned process; one folder per architecture."""
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        for folder in map(Path, folders):
            weights = torch.load(folder / "weights.pt", weights_only=True)
            policy = make_policy(folder, weights, ranks)
            torch.save(job(policy, rank, ranks), folder / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()
