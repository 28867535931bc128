"""Stochastic rounding of DTensors: every rank's shard against the same part of the whole."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from forge_ptq.numerics.rounding import stochastic_bf16
from forge_ptq.training import distributed


@pytest.fixture(params=range(4))
def mesh(request):
    """2 x 2 ranks, of which this process is one; nothing is sent."""
    if dist.is_initialized():  # by a trainer of another test, which is done
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=request.param, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(0)),
        (_StridedShard(0, split_factor=2), Shard(0)),  # FSDP's, of what tensor parallelism cut
        (Shard(0), Shard(1)),
        (_StridedShard(0, split_factor=2), Replicate()),
        (Replicate(), _StridedShard(0, split_factor=2)),
        (_StridedShard(1, split_factor=3), Shard(1)),
        (Shard(1), Replicate()),
        (Replicate(), Shard(0)),
        (Replicate(), Replicate()),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [8, 7, 2])
def test_shards_come_out_as_the_whole(mesh, placements, rows):
    whole = torch.randn(rows, 6, generator=torch.Generator().manual_seed(0))
    sharded = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    got = distributed.stochastic_bf16(sharded, "w")
    assert isinstance(got, DTensor)
    assert got.placements == sharded.placements
    assert got.shape == whole.shape
    wanted = distribute_tensor(stochastic_bf16(whole, "w"), mesh, placements, src_data_rank=None)
    assert torch.equal(got.to_local(), wanted.to_local())


def test_a_plain_tensor():
    whole = torch.randn(5, 6)
    assert torch.equal(distributed.stochastic_bf16(whole, "w"), stochastic_bf16(whole, "w"))


def test_another_layout(mesh):
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    local = distribute_tensor(whole, mesh, (Shard(0), Shard(1)), src_data_rank=None).to_local().t()
    turned = DTensor.from_local(
        local, mesh, (Shard(1), Shard(0)), run_check=False, shape=whole.t().shape, stride=(1, 6)
    )
    got = distributed.stochastic_bf16(turned, "w")
    assert isinstance(got, DTensor)
    assert got.is_contiguous()
    wanted = distribute_tensor(
        stochastic_bf16(whole.t(), "w"), mesh, (Shard(1), Shard(0)), src_data_rank=None
    )
    assert torch.equal(got.to_local(), wanted.to_local())


def test_partial_sums_are_refused(mesh):
    partial = DTensor.from_local(torch.ones(4, 4), mesh, (Partial(), Replicate()), run_check=False)
    with pytest.raises(TypeError, match=r"w: .*expected no partial sums"):
        distributed.stochastic_bf16(partial, "w")
