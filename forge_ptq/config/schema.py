"""Every option of a run. Top-level keys are torchforge's, plus `ptq`, `loss`, `advantages`,
`alarms`, `debug` and a few scalars. `titan.py`, `ptq.py`, `loss.py` and `placement.py` hold the
larger blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .block import Block, NaturalInt, NotNegative, Positive, PositiveInt
from .loss import AdvantagesConfig, AlarmsConfig, LossConfig
from .placement import ActorsConfig, ProvisionerConfig, ServicesConfig
from .ptq import PTQConfig
from .titan import RefModelConfig, TrainerConfig

LoggingMode = Literal["global_reduce", "per_rank_reduce", "per_rank_no_reduce"]


@dataclass(kw_only=True)
class ConsoleConfig(Block):
    """torchforge's block, no effect: the console shows the live view of the run, and the closing
    lines. Per-rank metrics are in Weights & Biases."""

    logging_mode: LoggingMode = "global_reduce"
    """torchforge's option, no effect: the console shows the live view of the run instead."""


@dataclass(kw_only=True)
class WandbConfig(Block):
    """Metrics in Weights & Biases."""

    project: str = "forge_ptq"
    """Project."""

    group: str | None = None
    """Group within the project."""

    name: str | None = None
    """Name of the run; null takes the name of the run's folder."""

    mode: Literal["online", "offline", "disabled"] = "offline"
    """`offline` writes to the run's folder; `wandb sync` uploads it later."""

    id: str | None = None
    """Id of a run to go on with."""

    resume: Literal["allow", "must", "never", "auto"] | None = None
    """What to do when `id` exists, as in wandb.init."""

    logging_mode: LoggingMode = "global_reduce"
    """One number per metric over all ranks, one per rank, or every single record."""


@dataclass(kw_only=True)
class MetricLoggingConfig(Block):
    """Where metrics go. Weights & Biases is off when null."""

    console: ConsoleConfig | None = field(default_factory=ConsoleConfig)
    """No effect: the console always shows the live view."""

    wandb: WandbConfig | None = None
    """Weights & Biases."""


@dataclass(kw_only=True)
class DatasetConfig(Block):
    """Prompts: a reasoning-gym task, generated, nothing to download."""

    task: str = "chain_sum"
    """Name of the task in reasoning-gym."""

    task_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task."""

    size: PositiveInt = 10_000
    """Distinct questions; they repeat after that."""

    seed: NaturalInt = 0
    """Seed of the questions."""

    prompt_template: str = "{question}"
    """The prompt; `{question}` is replaced."""

    system_prompt: str | None = None
    """System message in front, where the chat template is used."""

    use_chat_template: bool = False
    """Wrap the prompt in the tokenizer's chat template."""

    model: str
    """Checkpoint folder or name whose tokenizer is used."""


@dataclass(kw_only=True)
class RewardConfig(Block):
    """How a response is scored: the task's own check, all or nothing by default."""

    task: str = "chain_sum"
    """Name of the task in reasoning-gym; the dataset's."""

    extract: Literal["answer_tag", "last_number", "tag_or_last_number"] = "answer_tag"
    """Where the answer is: in <answer> tags, the last number, or the tags if there are any."""

    format_reward: NotNegative = 0.0
    """Added when an answer could be found, right or wrong."""

    partial_credit: bool = False
    """Keep the task's partial scores, which a policy learns to exploit."""


@dataclass(kw_only=True)
class PolicyConfig(Block):
    """The generator on vLLM."""

    engine_args: dict[str, Any] = field(default_factory=dict)
    """vLLM's EngineArgs. `engine_keys.py` lists the names that are passed on."""

    sampling_params: dict[str, Any] = field(default_factory=dict)
    """vLLM's SamplingParams; `n` must equal `group_size`."""

    request_timeout_s: Positive = 600.0
    """Seconds after which a request is aborted and fails."""

    drain_deadline_s: Positive = 60.0
    """Seconds that sequences may go on in a slot that is wanted for staging."""

    prefetch_weights_to_shm: bool = True
    """torchforge's option, no effect: the idle slot is filled straight from the store."""

    n_fetcher_procs: PositiveInt = 8
    """torchforge's option, no effect: this generator fetches in its own process."""


@dataclass(kw_only=True)
class ReplayBufferConfig(Block):
    """The replay buffer."""

    batch_size: PositiveInt = 8
    """Episodes per data-parallel rank and step."""

    max_policy_age: NaturalInt | None = None
    """Episodes of a policy more versions old than this are dropped; null keeps them."""

    dp_size: PositiveInt = 1
    """Data-parallel ranks of the trainer."""

    max_buffer_size: PositiveInt | None = None
    """Episodes held; null does not limit."""

    max_resample_count: NaturalInt | None = 0
    """How often one episode may be drawn again; null does not limit."""

    seed: NaturalInt | None = None
    """Seed of the draw; null is random."""


@dataclass(kw_only=True)
class InjectConfig(Block):
    """A fault put into the run on purpose."""

    step: PositiveInt
    """Policy version whose candidate is hit."""

    fault: Literal["corrupt_scales", "damage_live"] = "corrupt_scales"
    """`corrupt_scales`: wrong weight scales in a well-formed artifact; only the probe can tell.
    `damage_live`: the serving slot's scales are damaged after the commit; only probation can."""

    attempts: PositiveInt = 1
    """`corrupt_scales`: quantized candidates of that version that are hit, the demoted ones
    counted."""


@dataclass(kw_only=True)
class DebugConfig(Block):
    """For demonstrations and tests."""

    inject: list[InjectConfig] = field(default_factory=list)
    """Faults to inject, each of another version."""


@dataclass(kw_only=True)
class RunConfig(Block):
    """One run of `python -m apps.grpo_ptq.main`."""

    seed: NaturalInt = 0
    """Seed of prompts, sampling and training."""

    output_dir: str = "outputs"
    """Folder of all runs."""

    run_name: str | None = None
    """Folder of this run below it; null makes one from the configuration's name and the time."""

    model: str
    """Starting policy: a HF checkpoint folder, or ORG/NAME on the hub."""

    group_size: PositiveInt
    """Responses per prompt, compared with each other."""

    local_batch_size: PositiveInt
    """Episodes per training step and data-parallel rank."""

    max_req_tokens: PositiveInt
    """Longest prompt, in tokens."""

    max_res_tokens: PositiveInt
    """Longest response, in tokens."""

    off_by_n: NaturalInt = 1
    """Versions by which an episode may trail the trainer. 0 makes the run synchronous."""

    rollout_threads: PositiveInt = 1
    """Prompts in flight."""

    metric_logging: MetricLoggingConfig = field(default_factory=MetricLoggingConfig)
    """Where metrics go."""

    dataset: DatasetConfig
    """Prompts."""

    reward: RewardConfig = field(default_factory=RewardConfig)
    """Rewards."""

    policy: PolicyConfig
    """Generator."""

    trainer: TrainerConfig
    """Trainer."""

    loss: LossConfig = field(default_factory=LossConfig)
    """Loss."""

    advantages: AdvantagesConfig = field(default_factory=AdvantagesConfig)
    """Advantages."""

    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    """Alarms of training."""

    replay_buffer: ReplayBufferConfig
    """Replay buffer."""

    ref_model: RefModelConfig
    """Reference model."""

    ptq: PTQConfig = field(default_factory=PTQConfig)
    """Quantization in the loop."""

    services: ServicesConfig = field(default_factory=ServicesConfig)
    """Placement of the services."""

    actors: ActorsConfig = field(default_factory=ActorsConfig)
    """Placement of the actors."""

    debug: DebugConfig = field(default_factory=DebugConfig)
    """Fault injection."""

    provisioner: ProvisionerConfig | None = None
    """Scheduler for remote hosts; null runs on this machine."""
