"""The observer against ``measure`` on the tensors that the linears really read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forge_ptq.numerics import observer as module
from forge_ptq.numerics.observer import ActivationObserver
from forge_ptq.numerics.stats import ActivationStats, measure
from tests.unit.test_stats import assert_same


class Block(nn.Module):
    """Two linears that share an input of odd width, and one behind a nonlinearity."""

    def __init__(self, width: int = 37, inner: int = 53) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        self.inner = torch.relu(self.gate_proj(x_BTC)) * self.up_proj(x_BTC)
        return self.down_proj(self.inner)


SITES = ["gate_proj", "down_proj"]


def inputs(batch: int = 3, length: int = 11, width: int = 37, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x_BTC = torch.randn(batch, length, width, generator=generator)
    x_BTC[0, 0, 1], x_BTC[0, 1] = 3e4, 0.0
    return x_BTC


def observe(x_BTC, mask_BT=None, model=None, **options) -> tuple[dict[str, ActivationStats], Block]:
    model = (model or Block()).to(x_BTC.dtype)
    with ActivationObserver(model, SITES, **options) as observer:
        observer.mask_BT = mask_BT
        model(x_BTC)
        return observer.take(), model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 18])
def test_every_linear_input_is_measured(dtype, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
    x_BTC = inputs().to(dtype)
    stats, model = observe(x_BTC)
    assert list(stats) == SITES
    assert_same(stats["gate_proj"], measure(x_BTC))
    assert_same(stats["down_proj"], measure(model.inner))


def test_padding_is_left_out_and_position_0_is_not():
    x_BTC = inputs()
    mask_BT = torch.arange(11) < torch.tensor([[11], [4], [1]])
    x_BTC[1, 4:], x_BTC[2, 1:] = float("nan"), 1e9
    stats, model = observe(x_BTC, mask_BT)
    assert stats["gate_proj"].tokens == 16
    assert stats["gate_proj"].non_finite == 0
    assert_same(stats["gate_proj"], measure(x_BTC[mask_BT]))
    assert_same(stats["down_proj"], measure(model.inner[mask_BT]))
    nothing, _ = observe(x_BTC, torch.zeros(3, 11, dtype=torch.bool))
    assert_same(nothing["down_proj"], ActivationStats.empty(53))


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="gate_proj: an input of 33 positions under a mask of 30"):
        observe(inputs(), torch.ones(3, 10, dtype=torch.bool))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_unclean_batches_do_not_spoil_the_clean_ones(bad):
    model, clean, dirty = Block(), inputs(seed=1), inputs(seed=2)
    dirty[1, 2, 3] = bad
    with ActivationObserver(model, ["gate_proj"]) as observer:
        for x_BTC in (clean, dirty, clean):
            model(x_BTC)
        stats = observer.take()["gate_proj"]
    expected = measure(torch.cat([clean, dirty, clean]))
    assert expected.non_finite == (0 if bad == 3e38 else 1)
    assert_same(stats, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smoothing_is_divided_out_exactly(dtype):
    generator = torch.Generator().manual_seed(5)
    shift = {"gate_proj": torch.randint(-6, 7, (37,), generator=generator, dtype=torch.int8)}
    x_BTC = inputs().to(dtype)
    mask_BT = torch.arange(11) < torch.tensor([[11], [4], [1]])
    for mask in (None, mask_BT):
        stats, model = observe(x_BTC, mask, shift=shift)
        seen = x_BTC if mask is None else x_BTC[mask]
        assert_same(stats["gate_proj"], measure(seen / 2.0 ** shift["gate_proj"].float()))
        inner = model.inner if mask is None else model.inner[mask]
        assert_same(stats["down_proj"], measure(inner))
    with pytest.raises(ValueError, match="36 smoothing factors for 37"):
        observe(x_BTC, shift={"gate_proj": shift["gate_proj"][:36]})
    with pytest.raises(KeyError, match="up_proj"):
        observe(x_BTC, shift={"up_proj": shift["gate_proj"]})


def test_ranks_account_for_their_channels_only():
    x_BTC, shift = inputs(), {"gate_proj": torch.arange(37, dtype=torch.int8) % 5}
    whole, _ = observe(x_BTC, shift=shift)
    cuts = [slice(0, 19), slice(19, 37)]
    parts = [observe(x_BTC, shift=shift, channels={"gate_proj": cut})[0] for cut in cuts]
    halves = [part["gate_proj"] for part in parts]
    assert [half.channels for half in halves] == [19, 18]
    assert torch.equal(torch.cat([h.absmax_C for h in halves]), whole["gate_proj"].absmax_C)
    histogram_B = halves[0].histogram_B + halves[1].histogram_B
    assert torch.equal(histogram_B, whole["gate_proj"].histogram_B)


def test_take_resets_and_hooks_are_removed():
    model, x_BTC = Block(), inputs()
    channels = {"gate_proj": slice(0, 5)}
    with ActivationObserver(model, SITES, channels=channels) as observer:
        empty = observer.take()
        assert [empty[site].channels for site in SITES] == [5, 53]
        model(x_BTC)
        assert observer.take()["down_proj"].tokens == 33
        assert observer.take()["down_proj"].tokens == 0
        model(x_BTC)
    model(x_BTC)
    assert observer.take()["down_proj"].tokens == 33
    assert not model.gate_proj._forward_pre_hooks


def test_the_forward_pass_is_unchanged():
    x_BTC, model = inputs(), Block()
    before = model(x_BTC)
    with ActivationObserver(model, SITES, shift={"gate_proj": torch.ones(37)}) as observer:
        observer.mask_BT = None
        assert torch.equal(model(x_BTC), before)
