"""The names that the parser passes on to vLLM are vLLM's names."""

from __future__ import annotations

from forge_ptq.config.engine_keys import ENGINE_ARGS, SAMPLING_PARAMS, SET_BY_GENERATOR
from forge_ptq.engine.requests import sampling_params


def test_engine_arguments_exist_in_the_installed_vllm() -> None:
    from vllm.engine.arg_utils import EngineArgs

    known = set(EngineArgs.__dataclass_fields__)
    assert not set(ENGINE_ARGS) - known
    assert not set(SET_BY_GENERATOR) - known
    assert not set(ENGINE_ARGS) & set(SET_BY_GENERATOR)


def test_sampling_parameters_exist_in_the_installed_vllm() -> None:
    from vllm import SamplingParams

    assert not set(SAMPLING_PARAMS) - set(SamplingParams.__struct_fields__)


def test_null_stands_for_the_default_of_every_sampling_parameter() -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    (made,) = sampling_params(dict.fromkeys(SAMPLING_PARAMS), None, detokenize=True)
    assert made == SamplingParams(
        max_tokens=None, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY
    )
