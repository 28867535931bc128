"""PolicyCopy: a module tree that holds one policy version, and the things done with it.

It loads weights under HF names, runs rollouts through the policy (reference scores, activation
statistics, what a quantized policy would say) and turns its weights into the tensors of an
artifact. No actors, no store: a Quantizer process owns one, and so could a trainer rank.

The weights are always those the trainer pushed. Smoothing is folded in on the fly, by ``quantize``
into what it returns and by ``observe`` and ``evaluator`` into the inputs they look at.

Shape suffixes: B sequences, T positions, R response tokens, H hidden size, V vocabulary, C
channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from forge_ptq.numerics.calibration import Calibration
from forge_ptq.numerics.observer import ActivationObserver
from forge_ptq.numerics.plan import QuantPlan, sites_of
from forge_ptq.numerics.sensitivity import EMBEDDING, Group, groups_of, weight_error
from forge_ptq.numerics.smoothing import (
    ALPHA_GRID,
    DOWN_ALPHA,
    Folding,
    SmoothingSite,
    smooth_site,
    smoothing_sites,
)
from forge_ptq.numerics.stats import ActivationStats
from forge_ptq.services.policy_batches import (
    BATCH_TOKENS,
    Sequence_,
    batch_indices,
    make_batches,
    padded,
)
from forge_ptq.services.policy_evaluate import Evaluator
from forge_ptq.services.policy_load import Intake
from forge_ptq.services.policy_model import build_model
from forge_ptq.services.policy_quantize import (
    corrupt_scales,
    full,
    parameter_shares,
    quantize_parameters,
)
from forge_ptq.services.policy_tp import observing

__all__ = ["PolicyCopy", "Sequence_", "build_model", "full", "make_batches"]

Stats = dict[str, ActivationStats]
OnBatch = Callable[[int], None]
"""Called after every batch with the number done."""


class PolicyCopy:
    """A policy in full precision. ``version`` is None until ``load`` has succeeded."""

    def __init__(self, model: Any, plan: QuantPlan) -> None:
        self.model = model
        self.version: int | None = None
        self.intake = Intake(model)
        self.architecture = self.intake.architecture
        self.parameters = self.intake.parameters
        linears = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
        self.plan = plan
        self.layers = plan.resolve(linears)
        self.linears = linears
        self.batch_tokens = BATCH_TOKENS
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}

    def load(
        self, version: int, weights: Mapping[str, torch.Tensor], *, parts: bool = False
    ) -> None:
        """Copy a policy version in; ValueError naming the tensor that does not fit.

        weights: whole; with ``parts`` those that ``intake.slices`` names are just these slices. A
        tied weight may come under either or both of its names, but then equal.
        """
        before, self.version = self.version, None
        try:
            self.intake.load(version, weights, parts=parts)
        except ValueError:  # before anything was copied
            self.version = before
            raise
        self.version = version

    @property
    def sites(self) -> dict[str, tuple[str, ...]]:
        """{site: members} of every linear input that may be quantized, in the model's order."""
        return sites_of(self.layers)

    def smoothing_sites(self, *, down_proj: bool = False) -> dict[str, SmoothingSite]:
        """What can be smoothed in this architecture, see ``numerics.smoothing``."""
        return smoothing_sites(self.shapes, self.model.config, down_proj=down_proj)

    def head(self) -> torch.Tensor:
        """lm_head's weight [V, H]."""
        return full(self.model.lm_head.weight)

    @torch.no_grad()
    def reference(
        self, sequences: Sequence[Sequence_], observer: ActivationObserver | None = None
    ) -> list[torch.Tensor]:
        """Final-normed hidden states [R, H] that predict each sequence's response tokens, on CPU.

        Row i predicts token response_start + i, so it comes from position response_start + i - 1.
        An observer, entered by the caller, sees the same forward passes.
        """
        for index, sequence in enumerate(sequences):
            if not 1 <= sequence.response_start < len(sequence.token_ids):
                raise ValueError(
                    f"sequence {index}: response_start {sequence.response_start} must be within 1 "
                    f"and {len(sequence.token_ids) - 1}"
                )
        results: dict[int, torch.Tensor] = {}
        for indices in batch_indices(sequences, self.batch_tokens):
            hidden_BTH = self._forward([sequences[i] for i in indices], observer)
            for row, index in enumerate(indices):
                sequence = sequences[index]
                span = slice(sequence.response_start - 1, len(sequence.token_ids) - 1)
                results[index] = hidden_BTH[row, span].clone()
        return [results[index] for index in range(len(sequences))]

    @torch.no_grad()
    def observe(
        self,
        batches: Sequence[Sequence[Sequence_]],
        shift: Mapping[str, torch.Tensor] | None = None,
        on_batch: OnBatch | None = None,
    ) -> Stats:
        """Statistics of every site's input over all real positions, prompts and position 0 too.

        batches: from ``make_batches``. shift: log2 smoothing factors per site, int8 [C]; inputs are
        observed after dividing by them. Statistics of several calls add up to those of one call
        over all their batches; on a tensor-parallel rank they cover its slice of the channels.
        Non-finite activations are counted, they do not raise.
        """
        with observing(self.model, self.sites, shift) as observer:
            for done, batch in enumerate(batches, start=1):
                self._forward(batch, observer)
                if on_batch is not None:
                    on_batch(done)
            return observer.take()

    def smooth(
        self, stats: Mapping[str, ActivationStats], alpha: float | None, *, down_proj: bool = False
    ) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """({site: log2 factors int8 [C]}, {site: alpha}) from statistics of the raw inputs.

        alpha None: chosen per site. down_proj takes at most DOWN_ALPHA. Sites that come out
        unchanged are left out of both.
        """
        shifts: dict[str, torch.Tensor] = {}
        alphas: dict[str, float] = {}
        for name, site in self.smoothing_sites(down_proj=down_proj).items():
            if name not in stats:
                continue
            weights = [full(self.parameters[f"{member}.weight"]) for member in site.members]
            strength = alpha
            grid: tuple[float, ...] = ALPHA_GRID
            if name.endswith("down_proj"):
                strength = None if alpha is None else min(alpha, DOWN_ALPHA)
                grid = tuple(a for a in ALPHA_GRID if a <= DOWN_ALPHA)
            chosen, shift_C = smooth_site(site, stats[name], weights, strength, grid=grid)
            if bool(shift_C.any()):
                shifts[name], alphas[name] = shift_C, chosen
        return shifts, alphas

    def quantize(
        self,
        layers: Mapping[str, str],
        calibration: Calibration | Mapping[str, float] | None,
        *,
        names: Collection[str] | None = None,
        corrupt: bool = False,
        errors: dict[str, float] | None = None,
    ) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, str]]:
        """(tensors, layers, notes) of an artifact of the loaded version, or of a part of it.

        layers: scheme of every layer, which may differ from the calibration's. calibration: its
        ranges and smoothing factors (or ranges alone); None if nothing is static. names: the
        parameters of the part, see ``shares``. errors: takes the relative error of every int8
        weight, as made (not of what corrupt does to it). A static layer without a range becomes
        int8_dynamic together with its fused group, with a note.
        """
        absmax: Mapping[str, float] = {}
        folding = Folding({}, {})
        if isinstance(calibration, Calibration):
            absmax = calibration.absmax
            folding = Folding(self.smoothing_sites(down_proj=True), calibration.shift)
        elif calibration is not None:
            absmax = calibration
        tensors, used, notes = quantize_parameters(
            self.parameters, layers, absmax, folding, names, errors
        )
        if corrupt:
            if not any(scheme.startswith("int8") for scheme in layers.values()):
                raise ValueError("corrupt_scales needs an int8 layer, the plan has none")
            corrupt_scales(tensors)
        return tensors, used, notes

    def groups(
        self,
        stats: Mapping[str, ActivationStats],
        ranges: Mapping[str, float],
        shift: Mapping[str, torch.Tensor] | None = None,
        fixed: Mapping[str, str] | None = None,
    ) -> list[Group]:
        """What the planner decides about, with the local errors of inputs and weights as served.

        stats: per site, of the inputs divided by the factors of shift. ranges: per layer. fixed:
        schemes that are not to be changed, per layer.
        """
        folding = Folding(self.smoothing_sites(down_proj=True), shift or {})
        errors: dict[str, float] = {}
        table_VH = full(self.model.get_input_embeddings().weight)
        power = {EMBEDDING: float(table_VH.float().square().sum()) / table_VH.shape[0]}
        for name in self.layers:
            parameter = f"{name}.weight"
            weight_NK = folding.apply(parameter, full(self.parameters[parameter])).float()
            errors[name] = weight_error(weight_NK)
            power[name] = float(weight_NK.square().sum())
        return groups_of(self.layers, self.shapes, stats, ranges, fixed, power, errors)

    def shares(self, count: int) -> list[list[str]]:
        """Parameter names in ``count`` shares of about equal work, fused layers together."""
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        return parameter_shares(sizes, count)

    def evaluator(
        self,
        rollouts: Sequence[Sequence_],
        shift: Mapping[str, torch.Tensor] | None = None,
        hidden_GRH: Sequence[torch.Tensor] | None = None,
    ) -> Evaluator:
        """Scores many plans on the same rollouts, see ``policy_evaluate``."""
        return Evaluator(self, rollouts, shift, hidden_GRH)

    def evaluate(
        self,
        layers: Mapping[str, str],
        ranges: Mapping[str, float],
        shift: Mapping[str, torch.Tensor] | None,
        rollouts: Sequence[Sequence_],
        hidden_GRH: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """KL per response token [R] of each rollout, if the policy were quantized like this."""
        return self.evaluator(rollouts, shift, hidden_GRH).scores(layers, ranges).kl_GR

    def _forward(
        self, batch: Sequence[Sequence_], observer: ActivationObserver | None = None
    ) -> torch.Tensor:
        """Final-normed hidden states hidden_BTH of a padded batch, on the CPU."""
        tokens_BT, mask_BT = padded(batch)
        if observer is not None:
            observer.mask_BT = mask_BT
        device = next(iter(self.parameters.values())).device
        output = self.model.base_model(input_ids=tokens_BT.to(device), use_cache=False)
        return output.last_hidden_state.cpu()
