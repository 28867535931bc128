"""Every metric: its name, how values of one step become one number, what it means.

The names are stable: dashboards rely on them. Names that torchforge has keep its spelling. A test
compares the list with what the code records, so a new metric comes with its line here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reduction = Literal["mean", "sum", "max", "min", "std"]


@dataclass(frozen=True)
class MetricName:
    """One metric. `reduction` combines the values of one step over all processes."""

    name: str
    reduction: Reduction
    meaning: str


def _metrics(prefix: str, *entries: tuple[str, Reduction, str]) -> list[MetricName]:
    return [MetricName(f"{prefix}/{name}", reduction, text) for name, reduction, text in entries]


SPLIT: tuple[tuple[str, Reduction], ...] = (
    ("mismatch_k1", "mean"),
    ("mismatch_k3", "mean"),
    ("ratio_mean", "mean"),
    ("ratio_std", "mean"),
    ("ratio_max", "max"),
    ("ess", "mean"),
    ("max_abs_gap", "max"),
    ("masked_fraction", "mean"),
    ("vetoed_fraction", "mean"),
    ("rejected_fraction", "mean"),
)
"""Numbers of the trainer that exist within each scheme of a generator's weights (int8_static,
bf16_int8_dynamic...) and each age of its policy (age_0 to age_3, age_4_up) too."""

METRICS: tuple[MetricName, ...] = (
    *_metrics(
        "reward/evaluate_response",
        ("avg_total_reward", "mean", "reward of a response"),
        ("std_total_reward", "std", "spread of the rewards"),
        ("avg_correct", "mean", "share of right answers"),
        ("avg_formatted", "mean", "share of responses in which an answer was found"),
        ("count_calls", "sum", "responses scored"),
    ),
    *_metrics(
        "ptq/publish",
        ("accepted", "sum", "quantized candidates that serve"),
        ("demoted", "sum", "those of them with layers in a better scheme than planned"),
        ("refused", "sum", "publishes in which the gate turned a candidate down"),
        ("fell_back", "sum", "versions served in bf16 instead"),
        ("kept", "sum", "publishes after which the last good version serves on"),
        ("perplexity_rise", "mean", "relative rise over the full-precision policy, by KL"),
        ("refused_rise", "max", "the same of the worst candidate that was turned down"),
        ("nll_perplexity_rise", "mean", "the rise by paired NLL of the sampled tokens"),
        ("kl", "mean", "KL(full precision || candidate), nats per token"),
        ("worst_sequence_rise", "max", "perplexity rise of the worst probe sequence"),
        ("token_kl", "max", "99th percentile of the tokens' KL, nats"),
        ("weight_error", "max", "|W - dequantized| / |W| of the worst layer"),
        ("code_flip_fraction", "mean", "share of the int8 codes that the version changed"),
        ("probe_looks", "mean", "times that more rollouts were scored, the first included"),
        ("context_ess", "mean", "share of the probe's contexts that count as full precision's own"),
        ("probe_tokens", "mean", "tokens that the verdict rests on"),
        ("static_share", "mean", "share of the linear FLOPs with static INT8 activations"),
        ("dynamic_share", "mean", "share of the linear FLOPs with dynamic INT8 activations"),
        ("bf16_share", "mean", "share of the linear FLOPs left in bf16"),
        ("quantize_s", "mean", "load, quantize and store, seconds"),
        ("stage_s", "mean", "fill the idle slot, seconds"),
        ("probe_s", "mean", "score candidate and reference, seconds"),
        ("pause_s", "max", "longest wait of running sequences for a step, seconds"),
        ("wall_s", "mean", "the whole publish, seconds"),
        ("bytes", "mean", "size of the artifact"),
    ),
    *_metrics(
        "ptq/guard",
        ("steps", "max", "demotions in force"),
        ("level", "max", "share of the linear FLOPs in a better scheme than planned"),
        ("refusals", "sum", "candidates turned down"),
        ("failures", "sum", "candidates that failed on the way to the gate"),
        ("demotions", "sum", "steps down: the most sensitive layers to a better scheme"),
        ("promotions", "sum", "steps taken back after enough good publishes"),
        ("fallbacks", "sum", "turns to full precision"),
        ("keeps", "sum", "publishes after which the last good version serves on"),
        ("confirmations", "sum", "artifacts that live traffic confirmed"),
        ("condemnations", "sum", "artifacts whose probation failed"),
        ("rollbacks", "sum", "artifacts taken back"),
    ),
    *_metrics(
        "ptq/probation",
        ("episodes", "sum", "trained sequences judged"),
        ("mismatch_k3", "mean", "KL(generator || trainer) of a plan, nats per token"),
        ("control_k3", "mean", "the part of it that full precision shows at the same ages"),
        ("ess", "min", "effective sample size of a plan's tokens, as a share"),
        ("left_out", "mean", "share of its tokens that masks and the veto leave out of the loss"),
        ("alarms", "sum", "judgements over a threshold"),
    ),
    *_metrics(
        "ptq/ab",
        ("agreement", "mean", "reward of the quantized arm over that in full precision"),
        ("difference", "mean", "mean reward of the quantized arm less that in full precision"),
        ("p_value", "min", "of the test that the quantized arm is worse"),
    ),
    *_metrics(
        "ptq/calibration",
        ("made", "sum", "calibrations: scales, smoothing and plan made anew"),
        ("failed", "sum", "calibrations that missed their quorum or deadline"),
        ("seconds", "mean", "one calibration, seconds"),
        ("tokens", "mean", "tokens that it measured"),
        ("contributors", "mean", "replicas whose statistics went in"),
        ("dropped", "sum", "replicas or shares whose statistics did not"),
        ("predicted_rise", "mean", "perplexity rise that the search for the plan measured"),
    ),
    *_metrics(
        "ptq/drift",
        ("clipped_fraction", "max", "share of |x| above its static scale's range, worst layer"),
        ("js_distance", "max", "Jensen-Shannon distance to the calibrated |x|, worst layer"),
        ("absmax_ratio", "max", "largest |x| over the calibrated one, worst layer"),
        ("exceeded", "sum", "publishes at which a threshold was passed"),
    ),
    *_metrics(
        "rl_trainer",
        ("avg_loss", "mean", "GRPO loss"),
        ("policy_loss", "mean", "its policy term, per token"),
        ("kl_ref", "mean", "KL to the reference policy, nats per token (k3)"),
        ("entropy", "mean", "entropy of the policy, nats per token"),
        ("logprob", "mean", "log-probability of the sampled tokens under the trainer"),
        ("mismatch_k1", "mean", "KL(generator || trainer), nats per token, k1 estimate"),
        ("mismatch_k3", "mean", "the same, k3 estimate: never negative, less noise"),
        ("ratio_mean", "mean", "trainer over generator probability of a sampled token"),
        ("ratio_std", "mean", "standard deviation of these ratios over the tokens"),
        ("ratio_max", "max", "the largest of them"),
        ("ess", "mean", "effective sample size of these ratios, share of the tokens"),
        ("max_abs_gap", "max", "largest difference of one token's log-probability, nats"),
        ("masked_fraction", "mean", "share of the tokens that a correction left out of the loss"),
        ("vetoed_fraction", "mean", "share of the tokens in sequences under loss.veto_ratio"),
        ("rejected_fraction", "mean", "share in sequences with a logprob that is not finite"),
        ("ratio_capped", "mean", "share of tokens whose weight was cut at loss.tis_cap"),
        ("clipped", "mean", "share of tokens whose policy term loss.clip_low or clip_high stopped"),
        ("alarms", "sum", "numbers of a step that are over their limit: `alarms`, and probation's"),
        ("grad_norm", "mean", "gradient norm before clipping"),
        ("learning_rate", "mean", "learning rate"),
        ("tokens", "sum", "response tokens trained on"),
        ("step", "max", "training step"),
        ("skipped", "sum", "updates left out because their gradient was not finite"),
        ("skipped_total", "max", "the same since the start"),
        ("seconds", "mean", "one training step, seconds"),
        ("push_weights_s", "mean", "weights into TorchStore, seconds"),
        ("save_s", "mean", "one checkpoint, seconds"),
    ),
    *_metrics(
        "rl_trainer",
        *(
            (f"{name}/<split>", reduction, "the same within each scheme and policy age")
            for name, reduction in SPLIT
        ),
    ),
    *_metrics(
        "generator",
        ("generate/count_requests", "sum", "prompts"),
        ("generate/count_sequences_completed", "sum", "responses"),
        ("generate/sum_tokens_generated", "sum", "response tokens"),
        ("generate/avg_tokens_generated", "mean", "response tokens per prompt"),
        ("generate/companion_share", "mean", "share of sequences that the bf16 arm answered"),
    ),
    *_metrics(
        "generator_perf",
        ("stage/stage_s", "max", "fill the idle slot, seconds"),
        ("commit/pause_s", "max", "longest gap between two live steps since staging, seconds"),
    ),
    *_metrics(
        "buffer",
        ("add/count_episodes_added", "sum", "episodes put in"),
        ("sample/count_sample_requests", "sum", "batches asked for"),
        ("sample/avg_buffer_utilization", "mean", "share of the capacity in use"),
        ("sample/avg_data_utilization", "mean", "share of the episodes that a batch takes"),
        ("sample/avg_sampled_policy_age", "mean", "versions by which a batch trails the trainer"),
        ("sample/max_sampled_policy_age", "max", "the oldest episode of a batch"),
        ("sample/min_sampled_policy_age", "min", "the freshest episode of a batch"),
        ("evict/sum_episodes_evicted", "sum", "episodes dropped because they were too old"),
    ),
    *_metrics(
        "dataset/sample",
        ("count_samples_generated", "sum", "questions asked"),
        ("count_too_long", "sum", "questions passed over: longer than max_req_tokens"),
        ("avg_sample_len", "mean", "characters of a prompt"),
        ("current_epoch", "max", "passes over the questions"),
    ),
    *_metrics(
        "reference_perf/forward",
        ("count_forward_passes", "sum", "forward passes of the reference model"),
        ("avg_sequence_length", "mean", "tokens of a sequence, padding included"),
        ("seconds", "mean", "one forward pass, seconds"),
    ),
    *_metrics(
        "advantages/compute",
        ("share_zero_groups", "mean", "share of groups whose responses all earned the same"),
    ),
    *_metrics("main/rollout", ("response_tokens", "sum", "response tokens")),
)

BY_NAME: dict[str, MetricName] = {m.name: m for m in METRICS}


def markdown() -> str:
    """docs/metrics.md; `forge-ptq metrics-table` prints it."""
    lines = [
        "# Metrics",
        "",
        "Written by `forge-ptq metrics-table` from `forge_ptq/observe/names.py`. One number per",
        "metric and training step; the reduction says how it comes from the step's values.",
        "",
        "| name | reduction | meaning |",
        "|---|---|---|",
    ]
    for m in METRICS:
        meaning = m.meaning.replace("|", "\\|")
        lines.append(f"| `{m.name}` | {m.reduction} | {meaning} |")
    return "\n".join(lines) + "\n"
