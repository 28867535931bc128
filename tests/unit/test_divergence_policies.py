"""Which estimator to trust when the rollouts come from another policy than the reference: checked
on language models so small that every sequence can be written down.

Tokens 0 (ends the sequence), 1, 2; the next token depends on the two before; five tokens at most.
Expectations are sums over all sequences, so differences here are bias and nothing else.
"""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch

from forge_ptq.numerics.divergence import Divergence, compare, kl_per_token

VOCABULARY, LONGEST = 3, 5


@dataclass
class Model:
    """logits_CCV: of the next token, by the last two."""

    logits_CCV: torch.Tensor

    def logits(self, sequence: tuple[int, ...]) -> torch.Tensor:
        """[R, V] before every token of the sequence."""
        padded = (1, 2, *sequence)
        return torch.stack(
            [self.logits_CCV[padded[i], padded[i + 1]] for i in range(len(sequence))]
        )

    def logprobs(self, sequence: tuple[int, ...]) -> torch.Tensor:
        tokens_R1 = torch.tensor(sequence)[:, None]
        return self.logits(sequence).log_softmax(-1).gather(1, tokens_R1)[:, 0]

    def moved(self, by: float, seed: int) -> "Model":
        noise = torch.randn(self.logits_CCV.shape, generator=torch.Generator().manual_seed(seed))
        return Model(self.logits_CCV + by * noise.double())


def sequences() -> list[tuple[int, ...]]:
    """All that end with 0, or at the longest."""
    found = []
    for length in range(1, LONGEST + 1):
        for body in itertools.product((1, 2), repeat=length - 1):
            found += [(*body, last) for last in range(VOCABULARY if length == LONGEST else 1)]
    return found


SEQUENCES = sequences()
REF = Model(torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(0)).double())
OLDER = REF.moved(0.3, seed=1)
CANDIDATE = REF.moved(0.3, seed=2)


def scored(mu: Model, picks: list[tuple[int, ...]], *, kl: bool = True, known: bool = True):
    """compare() of the candidate on these sequences, sampled by mu."""
    return compare(
        [CANDIDATE.logprobs(s) for s in picks],
        [REF.logprobs(s) for s in picks],
        [kl_per_token(REF.logits(s), CANDIDATE.logits(s)) for s in picks] if kl else None,
        behaviour_GR=[mu.logprobs(s) for s in picks] if known else None,
    )


def expected(mu: Model, value: str, **kwargs: bool) -> float:
    """What a mean over tokens tends to when mu samples without end."""
    total = tokens = 0.0
    for sequence in SEQUENCES:
        probability = math.exp(float(mu.logprobs(sequence).sum()))
        result = scored(mu, [sequence], **kwargs)
        mean = result.log_rise.mean if value == "log_rise" else getattr(result, value)
        total += probability * mean * result.tokens
        tokens += probability * result.tokens
    return total / tokens


TRUTH = expected(REF, "nll_rise")


@pytest.mark.parametrize("mu", [REF, OLDER, CANDIDATE])
def test_all_sequences_are_there(mu):
    assert sum(math.exp(float(mu.logprobs(s).sum())) for s in SEQUENCES) == pytest.approx(1)


def test_on_the_references_own_tokens_every_estimator_is_unbiased():
    assert 0.02 < TRUTH < 0.04, "about the rise that a gate of 3 % is for"
    for value, kwargs in (
        ("log_rise", {}),
        ("log_rise", {"kl": False}),
        ("log_rise", {"kl": False, "known": False}),
    ):
        assert expected(REF, value, **kwargs) == pytest.approx(TRUTH, rel=1e-5)


@pytest.mark.parametrize(
    ("mu", "nll_is", "unweighted_within"),
    [(OLDER, "far off", 0.15), (CANDIDATE, "negative", 0.15)],
    ids=["older policy", "the candidate itself"],
)
def test_of_another_policys_tokens_kl_and_k3_can_be_trusted_and_nll_not(
    mu, nll_is, unweighted_within
):
    kl = expected(mu, "log_rise")
    assert kl == pytest.approx(TRUTH, rel=0.06)
    # Weighted, the next token is as if ref had sampled it: only the contexts are mu's, as for KL.
    assert expected(mu, "log_rise", kl=False) == pytest.approx(kl, rel=1e-5)
    unweighted = expected(mu, "log_rise", kl=False, known=False)
    assert unweighted == pytest.approx(TRUTH, rel=unweighted_within)
    nll = expected(mu, "nll_rise")
    if nll_is == "negative":
        assert nll < -0.8 * TRUTH, "a candidate this harmful would look better than the reference"
    else:
        assert abs(nll - TRUTH) > 0.5 * TRUTH


def test_the_bias_of_kl_is_of_second_order():
    """Harm times distance: with mu half as far from ref the bias of KL halves, while the NLL's
    does not go with the harm at all."""
    near, far = (expected(REF.moved(by, seed=1), "log_rise") for by in (0.15, 0.3))
    assert abs(near - TRUTH) < 0.65 * abs(far - TRUTH)


def sample(mu: Model, count: int, seed: int) -> list[tuple[int, ...]]:
    weights = torch.tensor([math.exp(float(mu.logprobs(s).sum())) for s in SEQUENCES])
    picks = torch.multinomial(weights, count, True, generator=torch.Generator().manual_seed(seed))
    return [SEQUENCES[int(pick)] for pick in picks]


def test_the_effective_sample_size_falls_with_the_distance_and_nothing_is_reweighted():
    far = REF.moved(1.0, seed=3)
    biased = expected(far, "log_rise")
    result: Divergence = scored(far, sample(far, 4000, seed=4))
    assert result.kl == pytest.approx(biased, rel=0.1), "what decides is not reweighted"
    assert result.context_ess is not None
    assert 0.5 < result.context_ess < 0.95
    near = scored(REF.moved(0.05, seed=3), sample(REF, 50, seed=4))
    assert near.context_ess is not None
    assert near.context_ess > 0.98
    assert scored(far, SEQUENCES[:5], known=False).context_ess is None


def test_the_effective_sample_size_by_hand():
    """Weights of the three contexts of one rollout: 1, ratio of the first token, of the first two
    cut at 10."""
    zeros, ref = [torch.zeros(3)], [torch.tensor([-1.0, -1.0, -1.0])]
    mu = [torch.tensor([-1.0 - math.log(2), -1.0 - math.log(20), -30.0])]
    result = compare(zeros, ref, [torch.tensor([0.1, 0.2, 0.3])], behaviour_GR=mu)
    assert result.context_ess == pytest.approx((1 + 2 + 10) ** 2 / (1 + 4 + 100) / 3)
