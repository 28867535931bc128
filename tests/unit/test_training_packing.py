"""Left-padded rollouts to left-packed sequences."""

import pytest
import torch

from forge_ptq.training import packing

TOKENS = torch.tensor([[0, 0, 1, 2, 5, 6, 0], [3, 4, 5, 6, 7, 0, 0]])
LENS = torch.tensor([2, 4])


def test_pack_moves_the_prompt_to_position_0():
    packed = packing.pack(TOKENS, LENS, request_len=4)
    assert packed.shape == (2, 7)
    assert packed[0, :4].tolist() == [1, 2, 5, 6]
    assert packed[1].tolist() == TOKENS[1].tolist()


def test_pack_is_as_short_as_the_longest_prompt_allows():
    tokens = torch.arange(2 * 40).view(2, 40)
    packed = packing.pack(tokens, torch.tensor([3, 5]), request_len=32)
    assert packed.shape == (2, 16)  # 5 + 8, rounded up
    assert packed[0, :11].tolist() == tokens[0, 29:].tolist()


def test_response_index_takes_what_predicts_each_token():
    packed = packing.pack(TOKENS, LENS, request_len=4)
    index = packing.response_index(LENS, 3)
    values = packed.unsqueeze(-1).float()
    # The value before each response token: last prompt token, then the response itself.
    assert packing.take(values, index)[..., 0].tolist() == [[2, 5, 6], [6, 7, 0]]


def test_lengths_from_the_leading_run_of_padding():
    assert packing.prompt_lengths(TOKENS, 4, pad_id=0).tolist() == [2, 4]
    assert packing.prompt_lengths(torch.zeros(1, 5).long(), 4, pad_id=0).tolist() == [1]
    inner = torch.tensor([[0, 1, 0, 2, 9]])  # only the leading run is padding
    assert packing.prompt_lengths(inner, 4, pad_id=0).tolist() == [3]
    with pytest.raises(ValueError, match="prompt_lens"):
        packing.prompt_lengths(TOKENS, 4, pad_id=None)


@pytest.mark.parametrize("lens", [[0, 4], [2, 5], [2]])
def test_bad_lengths_are_refused(lens):
    with pytest.raises(ValueError, match="prompt_lens"):
        packing.pack(TOKENS, torch.tensor(lens), request_len=4)


def test_trim_drops_columns_no_response_uses():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    targets = {"padding_mask": mask, "response": TOKENS[:, 4:], "advantages": torch.ones(2, 1)}
    tokens, shorter = packing.trim(TOKENS, targets)
    assert tokens.shape == (2, 6)
    assert shorter["response"].tolist() == [[5, 6], [7, 0]]
    assert shorter["advantages"].shape == (2, 1)
    empty = {**targets, "padding_mask": torch.zeros_like(mask)}
    assert packing.trim(TOKENS, empty)[1]["response"].shape == (2, 1)
