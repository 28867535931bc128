"""Scoring of the idle slot, with the full-vocabulary KL against the full-precision policy.

Token logprobs alone need thousands of tokens to show a rise of one percent; the KL of whole
distributions needs under a hundred. But logits of a whole vocabulary are too much to move between
processes, so only final-normed hidden states travel: lm_head is never quantized, hence the
reference policy's logits are the idle slot's own lm_head applied to its hidden states.

    candidate hidden states   caught by a forward hook in probe steps (``HiddenCapture``)
    z = h @ W_head.T          fp32, by vocabulary blocks, for both, between live steps (``score``)
    KL(ref || cand)           sum_v p_ref(v) * (log p_ref(v) - log p_cand(v))

Shape suffixes: T tokens of a chunk, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from forge_ptq.engine.types import ProbeScore, ProbeSequence, RequestError
from forge_ptq.numerics.divergence import kl_from_logprobs

VOCAB_BLOCK = 2048
CHUNK_ELEMENTS = 8_000_000
ROWS_PER_PIECE = 16


@dataclass
class _Wanted:
    first: int
    hidden_RH: torch.Tensor
    seen_R: torch.Tensor


class HiddenCapture:
    """Keeps the final-normed hidden states of chosen requests, whatever the chunking.

    The hook reads the batch layout of vLLM's V1 model runner: tokens of request i occupy
    ``query_start_loc[i] : query_start_loc[i + 1]`` of the flat batch, in ``input_batch.req_ids``
    order, and ``positions`` gives their places in the sequence. Recomputed positions overwrite.
    """

    def __init__(self, model: nn.Module, runner: Any) -> None:
        self._runner = runner
        self._wanted: dict[str, _Wanted] = {}
        model.register_forward_hook(self._hook, with_kwargs=True)

    def want(self, request_id: str, first: int, count: int, hidden_size: int) -> None:
        """Keep positions first .. first + count - 1 of a request (vLLM's internal id)."""
        self._wanted[request_id] = _Wanted(
            first, torch.empty(count, hidden_size), torch.zeros(count, dtype=torch.bool)
        )

    def take(self, request_id: str) -> torch.Tensor:
        """The request's hidden states [count, H] fp32; raises if a position was never computed."""
        wanted = self._wanted.pop(request_id)
        if not bool(wanted.seen_R.all()):
            missing = int((~wanted.seen_R).sum())
            raise RuntimeError(f"probe {request_id}: {missing} positions were not computed")
        return wanted.hidden_RH

    def drop(self, request_id: str) -> None:
        """Forget a request."""
        self._wanted.pop(request_id, None)

    def _hook(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not self._wanted:
            return
        positions = kwargs["positions"].cpu()
        starts = self._runner.query_start_loc.np
        for index, request_id in enumerate(self._runner.input_batch.req_ids):
            wanted = self._wanted.get(request_id)
            if wanted is None:
                continue
            begin, end = int(starts[index]), int(starts[index + 1])
            place_T = positions[begin:end] - wanted.first
            keep_T = (place_T >= 0) & (place_T < len(wanted.seen_R))
            where = place_T[keep_T]
            wanted.hidden_RH[where] = output[begin:end].detach().cpu()[keep_T].float()
            wanted.seen_R[where] = True


def check_sequence(sequence: ProbeSequence, hidden_size: int) -> int:
    """R of a sequence; RequestError says what is wrong with it."""
    total, start = len(sequence.token_ids), sequence.response_start
    if not 1 <= start < total:
        raise RequestError(f"probe: response_start {start} is not within 1..{total - 1}")
    reference = sequence.reference_hidden
    if reference is not None and tuple(reference.shape) != (total - start, hidden_size):
        raise RequestError(
            f"probe: reference_hidden must be [{total - start}, {hidden_size}], "
            f"got {list(reference.shape)}"
        )
    return total - start


def score(
    sequences: list[ProbeSequence],
    hidden: list[torch.Tensor],
    head_VH: torch.Tensor,
    *,
    scale: float = 1.0,
    soft_cap: float | None = None,
) -> Generator[None, None, list[ProbeScore]]:
    """Turn hidden states into scores, a few milliseconds of work at each ``next``.

    ``hidden[i]`` [R_i, H] are the candidate's states of sequence i. Returns one score per sequence.
    """
    vocab_size = head_VH.shape[0]
    rows = max(ROWS_PER_PIECE, CHUNK_ELEMENTS // vocab_size)
    scores = []
    for sequence, candidate_RH in zip(sequences, hidden, strict=True):
        targets_R = torch.tensor(sequence.token_ids[sequence.response_start :])
        reference_RH = sequence.reference_hidden
        parts: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = []
        for begin in range(0, len(targets_R), rows):
            pick = slice(begin, begin + rows)
            sides = [candidate_RH[pick]]
            if reference_RH is not None:
                sides.append(reference_RH[pick].float())
            logits = [torch.empty(len(side), vocab_size) for side in sides]
            for v in range(0, vocab_size, VOCAB_BLOCK):
                block_BH = head_VH[v : v + VOCAB_BLOCK].float().cpu()
                for side_TH, z_TV in zip(sides, logits, strict=True):
                    z_TV[:, v : v + VOCAB_BLOCK] = _shape_logits(
                        F.linear(side_TH, block_BH), scale, soft_cap
                    )
                yield
            for piece in range(0, len(sides[0]), ROWS_PER_PIECE):
                some = slice(piece, piece + ROWS_PER_PIECE)
                parts.append(_compare([z[some] for z in logits], targets_R[pick][some]))
                yield
        scores.append(_join(parts, reference_RH is not None))
    return scores


def _shape_logits(z: torch.Tensor, scale: float, soft_cap: float | None) -> torch.Tensor:
    if soft_cap is not None:
        z = soft_cap * torch.tanh(z / soft_cap)
    return z * scale if scale != 1.0 else z


def _compare(
    logits: list[torch.Tensor], targets_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    logp = [F.log_softmax(z_TV, dim=-1) for z_TV in logits]
    token = [p_TV.gather(1, targets_T[:, None]).squeeze(1) for p_TV in logp]
    if len(logp) == 1:
        return token[0], None, None
    return token[0], token[1], kl_from_logprobs(reference_RV=logp[1], candidate_RV=logp[0])


def _join(
    parts: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]], reference: bool
) -> ProbeScore:
    columns = list(zip(*parts, strict=True))
    if not reference:
        return ProbeScore(torch.cat(columns[0]))
    return ProbeScore(*(torch.cat(column) for column in columns))
