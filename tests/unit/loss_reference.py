"""The loss once more, one token at a time in fp64, from its definition."""

import math
from typing import Any

import torch

from forge_ptq.loss import GRPOLoss

B, R, V = 5, 6, 11


def grpo(**settings: Any) -> Any:
    """A GRPOLoss whose settings and outputs a test may take for granted."""
    return GRPOLoss(**settings)


def batch(seed: int = 0, spread: float = 0.9) -> dict[str, Any]:
    """Awkward on purpose: a full response, one of one token, an empty one; garbage on padding."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, R, V, generator=g)
    response = torch.randint(V, (B, R), generator=g)
    mask = torch.arange(R) < torch.tensor([[6], [1], [0], [3], [5]])
    own = logits.log_softmax(-1).gather(-1, response.unsqueeze(-1)).squeeze(-1)
    made = {
        "logits": logits,
        "response": response,
        "ref_logprobs": own + 0.3 * torch.randn(B, R, generator=g),
        "advantages": torch.tensor([[1.0], [-2.0], [0.5], [0.25], [-0.5]]),
        "padding_mask": mask,
        "generator_logprobs": own + spread * torch.randn(B, R, generator=g),
    }
    for name in ("ref_logprobs", "generator_logprobs"):
        made[name] = made[name].masked_fill(~mask, math.nan)
    return made


def tokens(data: dict[str, Any], rules: Any) -> list[list[dict[str, Any]]]:
    """Per sequence, per response token: gap, ratio, weight, kept, why not, lp, ref, A, anchor."""
    sequences = []
    for b in range(len(data["response"])):
        found: list[dict[str, Any]] = []
        for r in range(data["response"].shape[1]):
            if not data["padding_mask"][b, r]:
                continue
            scaled = data["logits"][b, r].double() / rules.temperature
            lp = float(scaled[data["response"][b, r]] - torch.logsumexp(scaled, 0))
            gen = float(data["generator_logprobs"][b, r])
            old = float(data["old_logprobs"][b, r]) if "old_logprobs" in data else lp
            ref = float(data["ref_logprobs"][b, r])
            bad = not all(math.isfinite(v) for v in (lp, gen, old, ref))
            token: dict[str, Any] = {"lp": lp, "gen": gen, "old": old, "ref": ref, "why": None}
            found.append({**token, "bad": bad})
        if any(t["bad"] for t in found):
            for t in found:
                t["why"] = "rejected"
        elif found:
            gaps = [t["old"] - t["gen"] for t in found]
            mean = math.exp(sum(gaps) / len(gaps))
            for t, gap in zip(found, gaps, strict=True):
                t["gap"], t["ratio"], t["weight"] = gap, math.exp(gap), 1.0
                for name in rules.corrections():
                    if name == "tis":
                        t["weight"] = min(t["ratio"], rules.tis_cap)
                    if name == "sequence_tis":
                        t["weight"] = min(mean, rules.tis_cap)
                    if name == "icepop":
                        t["weight"] = t["ratio"]
                        if not rules.icepop_low <= t["ratio"] <= rules.icepop_high:
                            t["why"] = "masked"
                    outside = not rules.geometric_low <= mean <= rules.geometric_high
                    if name == "geometric_mask" and outside:
                        t["why"] = "masked"
            if rules.veto_ratio is not None and any(t["ratio"] < rules.veto_ratio for t in found):
                for t in found:
                    t["why"] = "vetoed"
        for t in found:
            t["advantage"] = float(data["advantages"][b, 0])
        sequences.append(found)
    return sequences


def slow_loss(data: dict[str, Any], rules: Any) -> float:
    """The loss of the whole batch."""
    low = -math.inf if rules.clip_low is None else 1 - rules.clip_low
    high = math.inf if rules.clip_high is None else 1 + rules.clip_high
    clips = rules.clip_low is not None or rules.clip_high is not None
    per_sequence = []
    for found in tokens(data, rules):
        terms = []
        for t in found:
            if t["why"]:
                continue
            anchor = t["gen"] if clips and rules.clip_against == "generator" else t["old"]
            r, a = math.exp(t["lp"] - anchor), t["advantage"]
            surrogate = min(r * a, min(max(r, low), high) * a)
            kl = math.exp(t["ref"] - t["lp"]) - (t["ref"] - t["lp"]) - 1
            terms.append(-t["weight"] * surrogate + rules.beta * kl)
        if terms:
            per_sequence.append(terms)
    if not per_sequence:
        return 0.0
    if rules.aggregation == "token_mean":
        return sum(map(sum, per_sequence)) / sum(map(len, per_sequence))
    if rules.aggregation == "fixed_length":
        return sum(map(sum, per_sequence)) / rules.length_divisor / len(per_sequence)
    return sum(sum(s) / len(s) for s in per_sequence) / len(per_sequence)
