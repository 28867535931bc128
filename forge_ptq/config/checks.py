"""Keys that must fit each other. Every check adds (key path, message) to a list.

Types and ranges of single keys are in the schema and have been checked before.
"""

from __future__ import annotations

from typing import Any

from .build import Problems, closest
from .checks_ptq import check_publishing, check_scales
from .engine_keys import ENGINE_ARGS, SAMPLING_PARAMS, SET_BY_GENERATOR, describe, has_type
from .loss import loss_problems, sampling_problems
from .schema import RunConfig
from .titan import ParallelismConfig, rounding_problem


def check(config: RunConfig) -> Problems:
    """All problems of a well-typed configuration; empty when it is sound."""
    problems: Problems = []
    _lengths(config, problems)
    _engine(config, problems)
    _trainer(config, problems)
    _model_builds(config, problems)
    _placement(config, problems)
    check_publishing(config, problems)
    check_scales(config, problems)
    problems += loss_problems(config.loss)
    problems += sampling_problems(
        config.loss, config.policy.sampling_params, config.ref_model.temperature
    )
    if "{question}" not in config.dataset.prompt_template:
        problems.append(("dataset.prompt_template", "expected {question} somewhere in it"))
    if config.reward.task != config.dataset.task:
        message = f"got {config.reward.task!r}, expected dataset.task = {config.dataset.task!r}"
        problems.append(("reward.task", message))
    for path, model in (
        ("policy.engine_args.model", config.policy.engine_args.get("model")),
        ("dataset.model", config.dataset.model),
    ):
        if model and model != config.model:
            problems.append((path, f"got {model!r}, expected model = {config.model!r}"))
    if config.group_size < 2:
        problems.append(("group_size", f"got {config.group_size}, expected 2 or more to compare"))
    if not config.model:
        problems.append(("model", "is empty; expected a checkpoint folder or ORG/NAME"))
    return problems


def _lengths(config: RunConfig, problems: Problems) -> None:
    need = config.max_req_tokens + config.max_res_tokens
    terms = f"max_req_tokens + max_res_tokens = {need}"
    for path, block in (("trainer", config.trainer), ("ref_model", config.ref_model)):
        if (have := block.training.seq_len) < need:
            message = f"got {have}, expected at least {terms}"
            problems.append((f"{path}.training.seq_len", message))
    limit = config.policy.engine_args.get("max_model_len")
    if isinstance(limit, int) and limit < need:
        problems.append(("policy.engine_args.max_model_len", f"got {limit}, expected >= {terms}"))


def _free_form(
    block: dict[str, Any], known: dict[str, tuple[type, ...]], path: str, problems: Problems
) -> None:
    valid = f"; valid: {', '.join(known)}"  # said once
    for key, value in block.items():
        where = f"{path}.{key}"
        if key not in known:
            near = closest(key, list(known))
            hint = f"; did you mean {path}.{near}?" if near else valid
            if not near:
                valid = ""
            problems.append((where, f"not passed on to vLLM{hint}"))
        elif not has_type(value, known[key]):
            problems.append((where, f"got {value!r}, expected {describe(known[key])}"))


def _engine(config: RunConfig, problems: Problems) -> None:
    args, sampling = config.policy.engine_args, config.policy.sampling_params
    base = "policy.engine_args"
    for key in SET_BY_GENERATOR:
        if key in args:
            problems.append((f"{base}.{key}", "the generator sets this itself; remove it"))
    _free_form(
        {k: v for k, v in args.items() if k not in SET_BY_GENERATOR}, ENGINE_ARGS, base, problems
    )
    _free_form(sampling, SAMPLING_PARAMS, "policy.sampling_params", problems)
    if not args.get("model"):
        problems.append((f"{base}.model", "missing; expected the starting policy, as in ${model}"))
    if args.get("enforce_eager") is not True:
        message = "expected true: compiled engines remember the addresses of one slot's weights"
        problems.append((f"{base}.enforce_eager", message))
    for key in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if args.get(key) not in (None, 1):
            message = "expected 1: lanes need one process per replica for now"
            more = "services.policy.num_replicas gives more generators"
            problems.append((f"{base}.{key}", f"got {args[key]!r}, {message}; {more}"))
    if args.get("dtype", "bfloat16") not in ("bfloat16", "auto"):
        problems.append((f"{base}.dtype", f"got {args['dtype']!r}, expected bfloat16"))
    if args.get("async_scheduling"):
        message = "got true, expected false: steps of two slots must not overlap"
        problems.append((f"{base}.async_scheduling", message))
    base = "policy.sampling_params"
    if sampling.get("n") != config.group_size:
        message = f"got {sampling.get('n')}, expected group_size = {config.group_size}"
        problems.append((f"{base}.n", message))
    limit = sampling.get("max_tokens")
    if not isinstance(limit, int) or not 0 < limit <= config.max_res_tokens:
        message = f"got {limit}, expected 1 to max_res_tokens = {config.max_res_tokens}"
        problems.append((f"{base}.max_tokens", message))


def _degrees(p: ParallelismConfig, procs: int, path: str, where: str, problems: Problems) -> int:
    """Data-parallel degree of `procs` ranks; 0 with a problem noted when they do not fit."""
    shard = p.data_parallel_shard_degree
    if shard == 0 or shard < -1:
        message = f"got {shard}, expected -1 or more than 0"
        problems.append((f"{path}.data_parallel_shard_degree", message))
        return 0
    rest = p.data_parallel_replicate_degree * p.tensor_parallel_degree
    rest *= p.pipeline_parallel_degree * p.context_parallel_degree
    if shard == -1:
        if procs % rest:
            message = f"got {procs}, expected a multiple of {rest}, the product of the degrees"
            problems.append((where, f"{message} in {path}"))
            return 0
        shard = procs // rest
    elif rest * shard != procs:
        message = f"got {procs}, expected {rest * shard}, the product of the degrees in {path}"
        problems.append((where, message))
        return 0
    return shard * p.data_parallel_replicate_degree


def _trainer(config: RunConfig, problems: Problems) -> None:
    trainer, replay = config.trainer, config.replay_buffer
    path = "trainer.parallelism"
    dp = _degrees(
        trainer.parallelism, config.actors.trainer.procs, path, "actors.trainer.procs", problems
    )
    if dp and replay.dp_size != dp:
        message = f"got {replay.dp_size}, expected {dp}, the trainer's data-parallel degree"
        problems.append(("replay_buffer.dp_size", message))
    if replay.batch_size != config.local_batch_size:
        message = f"got {replay.batch_size}, expected local_batch_size = {config.local_batch_size}"
        problems.append(("replay_buffer.batch_size", message))
    micro = trainer.training.local_batch_size
    if micro > config.local_batch_size or config.local_batch_size % micro:
        message = f"got {micro}, expected a divisor of local_batch_size = {config.local_batch_size}"
        problems.append(("trainer.training.local_batch_size", message))
    if message := rounding_problem(trainer):
        problems.append(("trainer.push_rounding", message))
    if (age := replay.max_policy_age) != config.off_by_n:
        # Older ones would break off_by_n; dropping younger ones leaves training without episodes.
        message = f"got {age}, expected off_by_n = {config.off_by_n}"
        problems.append(("replay_buffer.max_policy_age", message))
    capacity = replay.max_buffer_size
    if capacity is not None and capacity < replay.batch_size * replay.dp_size:
        message = f"got {capacity}, expected at least batch_size * dp_size"
        problems.append(("replay_buffer.max_buffer_size", message))


def _model_builds(config: RunConfig, problems: Problems) -> None:
    """What the trainer and the reference model would refuse once their processes are up."""
    _degrees(
        config.ref_model.parallelism, config.services.ref_model.procs, "ref_model.parallelism",
        "services.ref_model.procs", problems,
    )  # fmt: skip
    for path, block in (("trainer", config.trainer), ("ref_model", config.ref_model)):
        for kind in ("pipeline", "context", "expert"):
            key = f"{kind}_parallel_degree"
            if (degree := block.parallelism[key]) != 1:
                message = f"got {degree}, expected 1: only data and tensor parallelism are built"
                problems.append((f"{path}.parallelism.{key}", message))
        if not block.checkpoint.initial_load_in_hf:
            message = "got false, expected true: initial weights are read in HF's format only"
            problems.append((f"{path}.checkpoint.initial_load_in_hf", message))


def _placement(config: RunConfig, problems: Problems) -> None:
    for group, block in (("services", config.services), ("actors", config.actors)):
        for name in block:
            options, base = getattr(block, name), f"{group}.{name}"
            if options.colocate is not None and options.procs != 1:
                message = f"got {options.procs}, expected 1 while colocate is set"
                problems.append((f"{base}.procs", message))
    if (procs := config.services.policy.procs) != 1:
        message = f"got {procs}, expected 1, the engine's ranks; num_replicas gives more generators"
        problems.append(("services.policy.procs", message))
