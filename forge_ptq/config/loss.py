"""The `loss`, `advantages` and `alarms` blocks, and what in them must fit each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .block import Block, NotNegative, Positive, PositiveInt, Share, TrueShare
from .build import Problems

Correction = Literal["none", "tis", "sequence_tis", "icepop", "geometric_mask"]
"""What corrects for rollouts of other weights, or of the same in other precision."""

WEIGHTING: tuple[Correction, ...] = ("tis", "sequence_tis", "icepop")
"""Corrections that weight tokens by the importance ratio: one of them at most."""


@dataclass(kw_only=True)
class LossConfig(Block):
    """The GRPO loss. `ratio` below is trainer over generator probability of a sampled token, the
    generator's being that of the scheme that sampled it."""

    beta: NotNegative = 0.1
    """Weight of the KL term to the reference model."""

    aggregation: Literal["sequence_mean", "token_mean", "fixed_length"] = "sequence_mean"
    """Mean over each response, then over responses; over all tokens alike; or, as Dr. GRPO has it,
    the sum over each response divided by `length_divisor`, then the mean over responses."""

    length_divisor: PositiveInt | None = None
    """For `fixed_length`: what sums over responses are divided by, as a rule `max_res_tokens`."""

    temperature: Positive = 1.0
    """Of sampling: divides the trainer's and the reference's logits as it does the generator's."""

    rollout_correction: Correction | list[Correction] = "tis"
    """`tis`: weight tokens by their ratio, truncated at `tis_cap`. `sequence_tis`: by the geometric
    mean of their sequence's ratios, truncated too. `icepop`: by their ratio, and leave tokens
    outside [`icepop_low`, `icepop_high`] out. `geometric_mask`: leave sequences out whose geometric
    mean is outside [`geometric_low`, `geometric_high`]; alone or in a list with another one."""

    tis_cap: Positive = 2.0
    """Largest weight of `tis` and `sequence_tis`."""

    icepop_low: Positive = 0.5
    """Smallest ratio of a token that `icepop` keeps."""

    icepop_high: Positive = 5.0
    """Largest ratio of a token that `icepop` keeps."""

    geometric_low: Positive = 0.9
    """Smallest geometric mean of a sequence that `geometric_mask` keeps. Long responses allow
    tighter limits: 0.999 for thousands of tokens; what is left out then by design counts for
    `ptq.guard.probation.max_left_out`."""

    geometric_high: Positive = 1.1
    """Largest geometric mean of a sequence that `geometric_mask` keeps."""

    veto_ratio: TrueShare | None = 1e-4
    """A single token whose ratio is smaller drops its sequence, whatever the correction; null drops
    none."""

    clip_low: TrueShare | None = None
    """PPO's clipping: a token of negative advantage whose ratio to the policy of `clip_against` is
    under 1 - `clip_low` teaches nothing. null does not clip on this side."""

    clip_high: Positive | None = None
    """The same for positive advantages over 1 + `clip_high`; larger than `clip_low` is clip-higher.
    """

    clip_against: Literal["generator", "proximal"] = "generator"
    """Whose probability the clipped ratio divides by. `generator`: PPO with the policy that sampled
    the tokens as the old one, so there is nothing left for a weighting `rollout_correction` to do.
    `proximal`: the trainer's own before the batch's first step, with `rollout_correction` between
    that and the generator (decoupled PPO); for loops that take several steps per batch and hand the
    loss `old_logprobs`. With the one step per batch of this loop that ratio is always 1."""

    def corrections(self) -> tuple[Correction, ...]:
        """`rollout_correction` as a tuple, empty for none."""
        given = self.rollout_correction
        names = (given,) if isinstance(given, str) else tuple(given)
        return tuple(name for name in names if name != "none")


@dataclass(kw_only=True)
class AdvantagesConfig(Block):
    """How rewards become advantages, within the group of responses to one prompt."""

    divide_by_std: bool = True
    """Divide by the standard deviation of the group's rewards, as GRPO does. Off, as in Dr. GRPO,
    easy and hard questions do not count more than others."""


@dataclass(kw_only=True)
class AlarmsConfig(Block):
    """When training says aloud that generator and trainer are apart. These speak of one step; what
    the guard acts on are the limits of ptq.guard.probation, over many episodes."""

    max_masked_fraction: Share = 0.2
    """Largest share of the response tokens that a mask leaves out."""

    max_vetoed_fraction: Share = 0.05
    """Largest share of the response tokens whose sequence `loss.veto_ratio` drops."""

    max_rejected_fraction: Share = 0.0
    """Largest share of the response tokens in sequences that have a log-probability that is not
    finite."""

    max_abs_gap: Positive = 12.0
    """Largest difference of one token's log-probability between generator and trainer, nats."""


def loss_problems(loss: LossConfig) -> Problems:
    """(key, message) for everything in a well-typed block that does not fit."""
    problems: Problems = []
    for kind in ("icepop", "geometric"):
        low, high = getattr(loss, f"{kind}_low"), getattr(loss, f"{kind}_high")
        if not low < high:
            message = f"got {low}, expected less than loss.{kind}_high = {high}"
            problems.append((f"loss.{kind}_low", message))
    if loss.aggregation == "fixed_length" and loss.length_divisor is None:
        message = "got null, expected a number of tokens while loss.aggregation is fixed_length"
        problems.append(("loss.length_divisor", message))
    names = loss.corrections()
    given = loss.rollout_correction
    if not isinstance(given, str) and "none" in given and len(given) > 1:
        problems.append(("loss.rollout_correction", f"got {given}, expected none to stand alone"))
    if len(set(names)) < len(names):
        problems.append(("loss.rollout_correction", f"got {list(names)}, expected each once"))
    weighting = [name for name in names if name in WEIGHTING]
    if len(set(weighting)) > 1:
        message = f"got {weighting}, expected at most one of {', '.join(WEIGHTING)}"
        problems.append(("loss.rollout_correction", message))
    clips = loss.clip_low is not None or loss.clip_high is not None
    if clips and loss.clip_against == "generator" and weighting:
        message = (
            f"got {weighting[0]}, expected none or geometric_mask: with loss.clip_against = "
            "generator the clipped ratio is the importance weight already"
        )
        problems.append(("loss.rollout_correction", message))
    return problems


LEAST_TEMPERATURE = 0.01
"""vLLM samples at this one where a smaller is asked for."""

UNTOUCHED: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "logit_bias": ({},),
    "allowed_token_ids": (),
}
"""Sampling parameters that change the distribution, and the values with which they do not. The
generator reports the log-probabilities of the distribution that it sampled, renormalised over the
tokens that these leave; the trainer, which sees the sampled token only, cannot."""


def sampling_problems(
    loss: LossConfig, sampling: dict[str, Any], ref_temperature: float
) -> Problems:
    """(key, message) where generator, trainer and reference would not score one distribution, or
    where clipping could not act."""
    problems: Problems = []
    base = "policy.sampling_params"
    if loss.temperature < LEAST_TEMPERATURE:
        message = f"got {loss.temperature}, expected {LEAST_TEMPERATURE} or more: vLLM raises it"
        problems.append(("loss.temperature", message))
    given: Any = sampling.get("temperature")
    for key, temperature in (
        (f"{base}.temperature", 1.0 if given is None else given),
        ("ref_model.temperature", ref_temperature),
    ):
        if temperature != loss.temperature:
            message = f"got {temperature}, expected loss.temperature = {loss.temperature}"
            problems.append((key, message))
    for key, allowed in UNTOUCHED.items():
        value: Any = sampling.get(key)
        if value is not None and value not in allowed:
            expected = allowed[0] if allowed else "null"
            message = (
                f"got {value}, expected {expected}: the trainer cannot tell which tokens "
                "that would leave, so its probabilities would not be the generator's"
            )
            problems.append((f"{base}.{key}", message))
    if loss.clip_against == "proximal" and (loss.clip_low or loss.clip_high):
        message = (
            "got proximal, expected generator: a batch gets one optimizer step here, so the "
            "ratio to the policy before it is always 1"
        )
        problems.append(("loss.clip_against", message))
    return problems
