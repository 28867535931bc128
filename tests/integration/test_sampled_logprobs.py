"""Log-probabilities of the distribution that was sampled: what the real engine reports, against
what the trainer computes from the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_ptq.loss import GRPOLoss, token_logprobs
from forge_ptq.mismatch import as_rows, reduce
from forge_ptq.training import titan
from forge_ptq.training.backward import response_logits
from tests.integration.engine_support import Harness, prompts, save_qwen3

TOKENS = 24
RESPONSES = 16


class Sampler:
    """The engine, and the trainer's model on the same checkpoint."""

    def __init__(self, folder: Path) -> None:
        save_qwen3(folder, tied=True)
        self.harness = Harness(folder)
        self.built = titan.build(folder, seq_len=256)
        self.prompts = prompts(RESPONSES)

    def sample(self, **params: Any) -> dict[str, torch.Tensor]:
        """Targets of a training batch: logits of the trainer, log-probabilities of the engine."""
        samples = self.harness.generate(self.prompts, max_tokens=TOKENS, seed=3, **params)
        width = max(map(len, self.prompts))
        rows = [[0] * (width - len(p)) + list(p) for p in self.prompts]
        response = torch.tensor([s.token_ids for s in samples])
        tokens = torch.cat([torch.tensor(rows), response], dim=1)
        lens = torch.tensor([len(p) for p in self.prompts])
        with torch.no_grad():
            logits = response_logits(self.built, tokens, lens, TOKENS).float()
        return {
            "logits": logits,
            "response": response,
            "generator_logprobs": torch.tensor([s.logprobs for s in samples]),
        }


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = Sampler(tmp_path_factory.mktemp("model") / "hf")
    yield made
    made.harness.thread.stop()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.4])
def test_engine_and_trainer_agree_at_the_sampling_temperature(sampler, temperature):
    data = sampler.sample(temperature=temperature)
    numbers = {}
    for assumed in {temperature, 1.0, 0.5}:
        targets = {
            **data,
            "ref_logprobs": token_logprobs(data["logits"], data["response"], assumed),
            "advantages": torch.ones(RESPONSES, 1),
            "padding_mask": torch.ones(RESPONSES, TOKENS, dtype=torch.bool),
        }
        output = GRPOLoss(temperature=assumed)(**targets)
        assert output.rows is not None
        numbers[assumed] = reduce(as_rows(output.rows))
    right = numbers.pop(temperature)
    # What is left is bf16 against fp32.
    assert right["mismatch_k3"] < 2e-3
    assert right["ess"] > 0.99
    assert right["max_abs_gap"] < 0.5
    for assumed, wrong in numbers.items():
        assert wrong["mismatch_k3"] > 10 * right["mismatch_k3"], assumed


def test_top_p_is_reported_renormalised_which_the_trainer_cannot_know(sampler):
    """Why the configuration refuses it: the gap is the log of the mass that was kept, every time to
    the same side."""
    temperature, top_p = 0.7, 0.9
    data = sampler.sample(temperature=temperature, top_p=top_p)
    logits = data["logits"] / temperature
    full = token_logprobs(logits, data["response"])
    gap = data["generator_logprobs"] - full
    ordered, _ = logits.softmax(-1).sort(-1, descending=True)
    # The smallest set that reaches top_p.
    kept = ordered * ((ordered.cumsum(-1) - ordered) < top_p)
    expected = -kept.sum(-1).log()
    assert float(gap.mean()) == pytest.approx(float(expected.mean()), abs=0.01)
    assert float((gap - expected).abs().median()) < 0.02
    assert float(expected.mean()) > 0.05
