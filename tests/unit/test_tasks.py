"""Episodes, collation, advantages, questions, rewards."""

import random
import string

import pytest
import torch

from apps.grpo_ptq.episodes import Episode, collate, mismatch_records
from apps.grpo_ptq.questions import QuestionSet
from apps.grpo_ptq.rewards import Scorer, from_last_number, from_tag
from apps.grpo_ptq.tasks import group_advantages
from forge_ptq.mismatch import COLUMNS
from forge_ptq.runtime import Completion


def episode(
    prompt: list[int], response: list[int], pad: int = 0, version: int = 7, **metadata: str
) -> Episode:
    completion = Completion(
        prompt="",
        text="",
        prompt_ids=torch.tensor(prompt),
        token_ids=torch.tensor(response),
        logprobs=-torch.arange(1.0, len(response) + 1),
        generator_version=version,
        metadata=metadata,
    )
    return Episode(
        episode_id="e",
        pad_id=pad,
        request_len=4,
        response_len=3,
        completion=completion,
        ref_logprobs=torch.full((3,), -0.5),
        reward=1.0,
        advantage=0.5,
    )


def test_padding_and_mask_come_from_lengths():
    # The response contains the pad id and the prompt begins with it: neither is padding.
    e = episode([0, 5], [0, 9])
    assert e.request_tensor.tolist() == [0, 0, 0, 5]
    assert e.response_tensor.tolist() == [0, 9, 0]
    assert e.response_mask.tolist() == [True, True, False]
    assert e.generator_logprobs.tolist() == [-1.0, -2.0, 0.0]
    assert (e.prompt_length, e.policy_version) == (2, 7)


@pytest.mark.parametrize(
    ("prompt", "response", "key"),
    [([1] * 5, [2], "max_req_tokens"), ([1], [2] * 4, "max_res_tokens")],
)
def test_too_long_is_an_error_that_names_the_key(prompt, response, key):
    e = episode(prompt, response)
    with pytest.raises(ValueError, match=key):
        _ = (e.request_tensor, e.response_tensor)


def test_collate_shapes_and_types():
    inputs, targets = collate([[episode([1, 2, 3, 4], [5]), episode([6], [7, 8, 9])]])
    assert inputs[0]["tokens"].tolist() == [[1, 2, 3, 4, 5, 0, 0], [0, 0, 0, 6, 7, 8, 9]]
    assert inputs[0]["prompt_lens"].tolist() == [4, 1]
    target = targets[0]
    assert target["padding_mask"].tolist() == [[True, False, False], [True, True, True]]
    assert target["advantages"].shape == (2, 1)
    assert target["ref_logprobs"].dtype == target["generator_logprobs"].dtype == torch.float32


def test_mismatch_records_say_where_each_sequence_came_from():
    """Rows come in the order of the inputs, over data-parallel ranks."""
    batches = [
        [episode([1, 2], [5], version=4, artifact_id="a", scheme="int8_static+bf16")],
        [
            episode([1, 2], [6, 7], version=3, artifact_id="b", scheme="bf16"),
            episode([2, 1], [6, 7], version=3),
        ],
    ]
    batches[1][0].reward = 0.25
    unscored = batches[1][1].completion
    assert unscored is not None
    unscored.logprobs = torch.tensor([-1.0, torch.nan])
    inputs, _ = collate(batches)
    rows = [{name: 10.0 * i + j for j, name in enumerate(COLUMNS)} for i in range(3)]
    records = mismatch_records(inputs, rows, step=5)
    assert [r.artifact_id for r in records] == ["a", "b", ""]
    assert [r.scheme for r in records] == ["int8_static+bf16", "bf16", "unknown"]
    assert [(r.policy_version, r.age) for r in records] == [(4, 1), (3, 2), (3, 2)]
    assert [r.reward for r in records] == [1.0, 0.25, 1.0]
    assert records[0].group == records[1].group != records[2].group
    assert [r.sampled_finite for r in records] == [True, True, False]
    for record, row in zip(records, rows, strict=True):
        for name in ("tokens", "k1_sum", "k3_sum", "ratio_sum", "ratio_sq_sum", "max_abs_gap"):
            assert getattr(record, name) == row[name]
        assert record.rejected == row["rejected"]
        assert record.left_out == row["masked"] + row["vetoed"]
    with pytest.raises(ValueError, match="2 rows of mismatch for 3 sequences"):
        mismatch_records(inputs, rows[:2], step=5)


def test_collate_refuses_unfinished_episodes():
    unfinished = episode([1], [2])
    unfinished.advantage = None
    with pytest.raises(ValueError, match="advantage"):
        collate([[unfinished]])


def test_advantages():
    assert group_advantages([1.0, 1.0, 1.0]) == [0.0, 0.0, 0.0]
    assert group_advantages([3.0]) == [0.0]
    values = torch.tensor(group_advantages([0.0, 1.0, 1.0, 0.0]))
    assert float(values.mean()) == pytest.approx(0, abs=1e-6)
    assert float(values.std()) == pytest.approx(1, abs=1e-3)
    plain = group_advantages([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0], divide_by_std=False)
    assert plain == [-0.375, 0.625, 0.625, -0.375, 0.625, -0.375, -0.375, -0.375]  # Dr. GRPO
    assert group_advantages([2.0, 2.0], divide_by_std=False) == [0.0, 0.0]
    with pytest.raises(ValueError, match="finite"):
        group_advantages([0.0, float("nan")])


ARGS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def test_questions_resume_in_order_and_reshuffle():
    first = QuestionSet("chain_sum", ARGS, size=5, seed=3)
    seen = [next(first)["question"] for _ in range(15)]
    again = QuestionSet("chain_sum", ARGS, size=5, seed=3)
    again.position = 7
    assert [next(again)["question"] for _ in range(8)] == seen[7:]
    assert sorted(seen[:5]) == sorted(seen[5:10]) == sorted(seen[10:])
    assert seen[5:10] != seen[10:]


def test_neighbouring_seeds_do_not_share_questions():
    args = {**ARGS, "min_digits": 4, "max_digits": 4}
    a, b = ([next(q)["question"] for _ in range(50)] for q in (
        QuestionSet("chain_sum", args, 50, 0), QuestionSet("chain_sum", args, 50, 1)
    ))  # fmt: skip
    assert not set(a) & set(b)


def test_bad_task_is_named():
    with pytest.raises(ValueError, match=r"dataset\.task: 'nope'"):
        QuestionSet("nope", {}, 10, 0)
    with pytest.raises(ValueError, match="min_terms"):
        QuestionSet("chain_sum", {"min_terms": 0}, 10, 0)


def test_extraction():
    assert from_tag("a <answer>1</answer> b <answer> -2 </answer>") == "-2"
    assert from_tag("<answer>3") is None
    assert from_last_number("so 1,234 - 4 = -1230.5!") == "-1230.5"
    assert from_last_number("none") is None


def test_scores():
    target = {"question": "", "answer": "12", "metadata": {}}
    scorer = Scorer("chain_sum", format_reward=0.25)
    assert scorer("<answer>12</answer>", target).reward == 1.25
    assert scorer("<answer>12.0</answer>", target).correct == 1.0
    # reasoning-gym alone gives this two thirds: it contains the digits.
    assert scorer("<answer>-12</answer>", target).reward == 0.25
    assert scorer("12", target).reward == 0.0
    partial = Scorer("chain_sum", partial_credit=True)
    assert partial("<answer>-12</answer>", target).correct == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="extract"):
        Scorer("chain_sum", extract="regex")


@pytest.mark.parametrize("task", ["chain_sum", "gcd", "basic_arithmetic", "simple_equations"])
def test_garbage_never_raises(task):
    rng = random.Random(0)
    scorer = Scorer(task, extract="tag_or_last_number")
    target = {"question": "?", "answer": "3", "metadata": {}}
    texts = ["", "<answer></answer>", "<answer>nan</answer>", "<answer>snan</answer>"]
    texts += ["<answer>1e999999999</answer>", "<answer>(((((</answer>", "9" * 30_000, "\x00é"]
    texts += ["<answer>" * 3000, "<answer>" + "(" * 5000 + "</answer>"]
    texts += ["".join(rng.choices(string.printable, k=60)) for _ in range(50)]
    for text in texts:
        assert 0.0 <= scorer(text, target).reward <= 1.0
