"""The guard's part of the `ptq` block: the gate before traffic, what follows a refusal, and the
watch over what serves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .block import Block, NaturalInt, Positive, PositiveInt, PositiveShare, TrueShare

Rung = Literal["demote", "bf16", "keep"]
"""What can follow a refusal."""


@dataclass(kw_only=True)
class ProbationConfig(Block):
    """The watch over a version that serves. What only live traffic shows takes it back."""

    enabled: bool = True
    """Judge what serves. Off, the numbers are logged all the same."""

    episodes: PositiveInt = 64
    """Episodes of what serves that a judgement rests on."""

    max_mismatch_kl: Positive = 0.05
    """Largest KL(generator || trainer) in nats per token (k3 estimate), beyond that of policy age
    where full-precision episodes show it. 0.05 is 5 % in perplexity; age alone, of one or two
    steps, came to 0.003 in the demo, of five to 0.03: raise it with `off_by_n`."""

    min_ess: TrueShare = 0.5
    """Smallest effective sample size of the tokens' importance ratios, as a share of the tokens."""

    max_left_out: PositiveShare = 0.3
    """Largest share that masks and the veto of `loss` leave out of the response tokens that they
    would keep in full precision. A veto may drop most of the data at a small mismatch: in a
    response of 4,000 tokens one improbable token is enough. 1 sets no limit. Where a mask leaves
    out much by design, raise it, or let `ptq.ab` show how much that is in full precision. It takes
    `episodes` of some dozens of prompts: responses to one prompt are dropped together."""

    patience: PositiveInt = 2
    """Judgements in a row over a threshold that count as one failure; one where it is four times
    over it (under a quarter of the effective sample size, or of the tokens, that must be left)."""


@dataclass(kw_only=True)
class GuardConfig(Block):
    """When a candidate may serve, and what happens when it may not."""

    max_perplexity_rise: PositiveShare = 0.03
    """Largest relative rise over the full-precision policy of the same version. 0.03 is 3 %."""

    max_worst_rise: Positive = 0.5
    """Largest rise of the single worst rollout: damage that the mean hides. Candidates about the
    limit of 3 % stay under a third of this, scales that do not fit are far over it."""

    max_token_kl: Positive = 1.0
    """Largest 99th percentile of the tokens' KL to the full-precision policy, in nats. Likewise."""

    max_weight_error: TrueShare = 0.1
    """Largest relative error |W - dequantized| / |W| of one layer's weight (Frobenius norms)."""

    confidence: TrueShare = 0.95
    """Of the interval, clustered by prompt, that has to lie on one side of the limit; while it
    does not, more rollouts are scored, up to `ptq.probe.max_sequences`. It holds for all these
    looks together: each has its share of the error."""

    on_reject: list[Rung] = field(default_factory=lambda: ["demote", "bf16", "keep"])
    """What follows a refusal, in this order, until something serves. `demote`: the most sensitive
    layers go from static to dynamic to bf16, and the candidate is made again; `bf16`: this version
    serves in full precision; `keep`: the last good version serves on. Empty is `keep`. Without
    `demote`, a failed probation puts the whole model into bf16, for `recover_after` publishes."""

    demote_attempts: PositiveInt = 2
    """Candidates made by `demote` for one version."""

    demote_share: TrueShare = 0.15
    """Share of the linear FLOPs that one demotion moves to the next better scheme."""

    recover_after: PositiveInt = 5
    """Publishes in a row that must pass before the latest demotion is taken back; twice as many
    after each time that taking it back failed."""

    probation: ProbationConfig = field(default_factory=ProbationConfig)
    """The watch after a commit."""


@dataclass(kw_only=True)
class ABConfig(Block):
    """A share of the prompts is answered in full precision, to compare rewards."""

    enabled: bool = False
    """Serve the version that serves in bf16 too, from the idle slot of every replica."""

    fraction: TrueShare = 0.5
    """Share of the prompts answered in full precision."""

    min_prompts: PositiveInt = 32
    """Prompts per arm before rewards are compared; then again at 2, 4 and 8 times as many, after
    which a new comparison begins."""

    min_agreement: PositiveShare = 0.95
    """Mean reward of the quantized arm over that of the full-precision arm; less rolls back once
    the difference is significant at `significance`."""

    significance: TrueShare = 0.05
    """Of the test of the difference (Welch's t over prompts, one-sided): the chance that rewards
    take a healthy plan back within eight comparisons of 8 * `min_prompts` prompts per arm, all
    their looks together; each has an eighth of it."""


@dataclass(kw_only=True)
class PrecisionByLoadConfig(Block):
    """Full precision while the engine has little to do, INT8 while it has much."""

    enabled: bool = False
    """Serve the version that serves in bf16 too, from the idle slot of every replica."""

    bf16_below: NaturalInt = 4
    """Unfinished sequences of a replica at or under which new ones start in bf16."""

    int8_above: PositiveInt = 16
    """Unfinished sequences at or over which new ones start in INT8; in between it stays as it
    is."""
