"""What ``generate`` takes and gives: prompts and sampling parameters in, completions out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_ptq.engine.types import RequestError, Sample
from forge_ptq.runtime import Completion


def token_ids(prompt: str | list[int], tokenizer: Any) -> list[int]:
    """The prompt's tokens; RequestError for text without a tokenizer."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("the prompt is text, but the model has no tokenizer: pass ids")
        prompt = tokenizer.encode(prompt)
    return [int(token) for token in prompt]


def sampling_params(
    defaults: Mapping[str, Any], overrides: Mapping[str, Any] | None, *, detokenize: bool
) -> list[Any]:
    """One vLLM SamplingParams per sample; RequestError names what is wrong."""
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    merged = {**defaults, **(overrides or {})}
    # null stands for vLLM's default, which its own class knows of max_tokens only: no limit.
    merged = {k: v for k, v in merged.items() if v is not None or k == "max_tokens"}
    count = merged.pop("n", 1)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise RequestError(f"sampling_params.n must be a positive integer, got {count!r}")
    merged["logprobs"] = merged.get("logprobs") or 0
    merged["output_kind"] = RequestOutputKind.FINAL_ONLY
    if not detokenize:
        merged["detokenize"] = False
    seed = merged.pop("seed", None)
    try:
        return [
            SamplingParams(**merged, seed=None if seed is None else seed + index)
            for index in range(count)
        ]
    except (TypeError, ValueError, VLLMClientError) as error:
        raise RequestError(f"sampling_params: {error}") from error


def completion(prompt: str | list[int], sample: Sample) -> Completion:
    """A finished sequence as the caller gets it.

    ``metadata``: artifact_id and scheme of what produced it; slot; arm (live or companion), and
    drawn, true where the arm was chosen by lot (A/B): only such may be compared; resubmitted, how
    often it was started again; latency_s from the first admission on.
    """
    import torch

    return Completion(
        prompt=prompt,
        text=sample.text,
        prompt_ids=torch.tensor(sample.prompt_ids, dtype=torch.int64),
        token_ids=torch.tensor(sample.token_ids, dtype=torch.int64),
        logprobs=torch.tensor(sample.logprobs, dtype=torch.float32),
        stop_reason=sample.stop_reason,
        generator_version=sample.policy_version,
        metadata={
            "artifact_id": sample.artifact_id,
            "scheme": sample.scheme_tag,
            "slot": sample.slot,
            "arm": sample.arm,
            "drawn": sample.drawn,
            "resubmitted": sample.resubmitted,
            "latency_s": sample.queue_to_done_s,
        },
    )
