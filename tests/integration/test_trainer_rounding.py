"""What the trainer pushes and exports of fp32 weights that moved by less than bf16 can tell."""

import pytest
import torch

from forge_ptq.config.titan import PushRounding
from forge_ptq.loss import GRPOLoss
from forge_ptq.models import checkpoint
from forge_ptq.training.engine import TrainEngine
from forge_ptq.training.trainer import TitanTrainer
from tests.integration.trainer_support import batch, config, save_policy, weights

LEARNING_RATE = 1e-6


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A checkpoint of bf16 weights, as released models are."""
    folder = save_policy(tmp_path_factory.mktemp("rounding") / "policy", "llama")
    state = {k: v.bfloat16() for k, v in checkpoint.iter_tensors(folder)}
    checkpoint.save_tensors(folder, state)
    return folder


def trained(policy, how: PushRounding, **training) -> TrainEngine:
    settings = config(policy, **training)
    settings.push_rounding, settings.optimizer.lr = how, LEARNING_RATE
    engine = TrainEngine(settings, GRPOLoss())
    engine.step(*([x] for x in batch()))
    return engine


def flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([state[k].double().flatten() for k in sorted(state)])


def moved(engine: TrainEngine, policy) -> tuple[torch.Tensor, torch.Tensor]:
    """(what was learnt, what of it is pushed), all weights in a row."""
    start = flat(dict(checkpoint.iter_tensors(policy)))
    return flat(weights(engine)) - start, flat(engine.full_hf_state()) - start


@pytest.mark.parametrize("how", ["nearest", "auto"])
def test_only_stochastic_rounding_pushes_small_updates(policy, how):
    engine = trained(policy, how)
    learnt, pushed = moved(engine, policy)
    assert 0 < float(learnt.abs().max()) <= LEARNING_RATE
    # How much of the update is there, in the direction of the update.
    share = float(pushed @ learnt / (learnt @ learnt))
    if how == "nearest":
        assert share < 0.3
    else:
        assert share == pytest.approx(1, abs=0.2)
    assert all(v.dtype == torch.bfloat16 for v in engine.hf_state().values())


def test_the_export_has_what_was_pushed(policy, tmp_path):
    engine = trained(policy, "auto")
    engine.export(tmp_path / "hf")
    pushed, exported = engine.full_hf_state(), dict(checkpoint.iter_tensors(tmp_path / "hf"))
    assert set(pushed) == set(exported)
    assert all(torch.equal(pushed[k], exported[k]) for k in pushed)


@pytest.mark.parametrize(
    ("how", "training", "stochastic"),
    [
        ("auto", {"mixed_precision_param": "float32"}, True),
        ("auto", {"mixed_precision_param": "bfloat16"}, False),
        ("stochastic", {"mixed_precision_param": "bfloat16"}, True),
        ("nearest", {"mixed_precision_param": "float32"}, False),
        ("stochastic", {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"}, False),
    ],
)
def test_which_rounding(policy, how, training, stochastic):
    engine = trained(policy, how, **training)
    assert engine.rounds_stochastically == stochastic
    same = {
        k: torch.equal(v, engine.hf_state(torch.float32)[k].bfloat16())
        for k, v in engine.hf_state().items()
    }
    assert all(same.values()) != stochastic


def test_an_unknown_rounding_is_refused(policy):
    with pytest.raises(ValueError, match=r"trainer.push_rounding: 'up'; expected one of auto"):
        TitanTrainer(**{**config(policy).to_dict(), "push_rounding": "up"})


def test_stochastic_rounding_of_what_is_bf16_already_is_refused(policy):
    blocks = config(policy, dtype="bfloat16").to_dict()
    with pytest.raises(ValueError, match="expected auto or nearest"):
        TitanTrainer(**{**blocks, "push_rounding": "stochastic"})
