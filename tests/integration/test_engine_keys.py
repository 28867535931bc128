"""The names that the parser passes on to vLLM are vLLM's names."""

from __future__ import annotations

from forge_ptq.config.engine_keys import ENGINE_ARGS, SAMPLING_PARAMS, SET_BY_GENERATOR


def test_engine_arguments_exist_in_the_installed_vllm() -> None:
    from vllm.engine.arg_utils import EngineArgs

    known = set(EngineArgs.__dataclass_fields__)
    assert not set(ENGINE_ARGS) - known
    assert not set(SET_BY_GENERATOR) - known
    assert not set(ENGINE_ARGS) & set(SET_BY_GENERATOR)


def test_sampling_parameters_exist_in_the_installed_vllm() -> None:
    from vllm import SamplingParams

    assert not set(SAMPLING_PARAMS) - set(SamplingParams.__struct_fields__)
