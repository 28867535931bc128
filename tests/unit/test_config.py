"""The configuration: strict, complete in its complaints, and the shipped files are good."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from forge_ptq.config import (
    ConfigError,
    OptimizerConfig,
    RunConfig,
    from_mapping,
    load_config,
    save_config,
)
from forge_ptq.config.docs import field_docs, markdown, rows
from forge_ptq.config.load import split_key

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "configs" / "tiny_cpu.yaml"
OTHERS = ("sft_", "compare_")  # configurations of other commands
SHIPPED = sorted(p for p in (ROOT / "configs").glob("*.yaml") if not p.name.startswith(OTHERS))


def problems(*overrides: str, path: Path = TINY) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return dict(caught.value.problems)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_configurations_are_good(path: Path) -> None:
    config = load_config(path)
    assert config.ptq.enabled
    assert config.policy.sampling_params["n"] == config.group_size
    lines = path.read_text().splitlines()
    assert ">>> python -m apps.grpo_ptq.main --config" in "\n".join(lines[:3])
    assert f"configs/{path.name}" in "\n".join(lines[:3])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_every_option_of_a_run_has_a_comment(path: Path) -> None:
    """A key is explained where it first appears by name; blocks by the comment above or beside."""
    seen: set[str] = set()
    bare = []
    for line in path.read_text().splitlines()[3:]:
        key, colon, rest = line.strip().partition(":")
        if not colon or key.startswith("#") or " " in key or '"' in key:
            continue
        if rest.strip() and "#" not in rest and "${" not in rest and key not in seen:
            bare.append(key)
        seen.add(key)
    # Names that speak for themselves, and the members of commented groups.
    allowed = {
        "name", "model", "lr", "beta1", "beta2", "eps", "weight_decay", "decay_type", "n",
        "temperature", "top_p", "min_terms", "max_terms", "min_digits", "max_digits",
        "procs", "num_replicas", "with_gpus", "replica_max_concurrent_requests", "logging_mode",
        "OMP_NUM_THREADS", "disable_loss_parallel", "selective_ac_option",
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_replicate_degree",
        "data_parallel_shard_degree", "tensor_parallel_degree", "pipeline_parallel_degree",
        "context_parallel_degree", "expert_parallel_degree",
        "calibrate_s", "quantize_s", "stage_s", "probe_s", "commit_s", "drain_s",
    }  # fmt: skip
    assert set(bare) <= allowed


def test_all_three_schemes_stand_side_by_side_in_the_tiny_plan() -> None:
    plan = load_config(TINY).ptq.plan
    assert {plan.default, *plan.overrides.values()} == {"int8_dynamic", "int8_static", "bf16"}


def test_unknown_keys_name_their_path_and_the_closest_valid_one() -> None:
    found = problems(
        "ptq.guard.max_perplexity_ris=0.1", "publish_every=2", "debug.inject=[{stepp: 3}]"
    )
    assert found["ptq.guard.max_perplexity_ris"].endswith("ptq.guard.max_perplexity_rise?")
    assert "ptq.publish_every" in found["publish_every"]
    assert "debug.inject[0].step?" in found["debug.inject[0].stepp"]


def test_a_misspelt_key_of_another_block_is_found_there() -> None:
    found = problems(
        "rollout_corection=tis", "rollout_thread=2", "ptq.guard.off_by_m=1", "ptq.probe.sequence=9"
    )
    assert found["rollout_corection"].endswith("did you mean loss.rollout_correction?")
    assert found["rollout_thread"].endswith("did you mean rollout_threads?")
    assert found["ptq.guard.off_by_m"].endswith("did you mean off_by_n?")
    assert found["ptq.probe.sequence"].endswith("did you mean ptq.probe.sequences?")


def test_the_valid_keys_of_a_block_are_listed_once() -> None:
    found = problems("qqq=1", "zzz=1", "ptq.ab.qqq=1", "ptq.ab.zzz=1")
    assert found["qqq"].startswith("unknown key; valid here: seed, ")
    assert found["zzz"] == found["ptq.ab.zzz"] == "unknown key"
    assert found["ptq.ab.qqq"].startswith("unknown key; valid here: enabled, fraction, ")
    base = "policy.engine_args"
    found = problems(f"{base}.qqq=1", f"{base}.zzz=1", f"{base}.max_model_length=9")
    assert found[f"{base}.qqq"].startswith("not passed on to vLLM; valid: ")
    assert found[f"{base}.zzz"] == "not passed on to vLLM"
    assert found[f"{base}.max_model_length"].endswith(f"did you mean {base}.max_model_len?")


def test_one_value_or_a_list_names_the_bad_item() -> None:
    key = "loss.rollout_correction"
    names = "none, tis, sequence_tis, icepop, geometric_mask"
    expected = f"(str), expected one of {names}; did you mean"
    assert problems(f"{key}=tiss") == {key: f"got 'tiss' {expected} tis?"}
    assert problems(f"{key}=[tis, icpop]") == {f"{key}[1]": f"got 'icpop' {expected} icepop?"}
    message = f"got 3 (int), expected one of {names} or a list of {names}"
    assert problems(f"{key}=3") == {key: message}
    rungs = problems("ptq.guard.on_reject=keep")["ptq.guard.on_reject"]
    assert rungs == "got 'keep' (str), expected a list of demote, bf16, keep"


@pytest.mark.parametrize("given", ["[none, tis]", "[tis, none]", "[none, none]"])
def test_no_correction_stands_alone(given: str) -> None:
    key = "loss.rollout_correction"
    assert problems(f"{key}={given}")[key].endswith("expected none to stand alone")
    assert load_config(TINY, [f"{key}=[none]"]).loss.corrections() == ()


def test_ill_typed_values_name_path_value_and_expected_type() -> None:
    found = problems(
        "group_size=eight", "rollout_threads=true", "seed=1.5", "trainer.optimizer.lr=fast",
        "ptq.enabled=1", "services.policy=3", "ptq.plan.default=int8_dynamc",
    )  # fmt: skip
    assert found["group_size"] == "got 'eight' (str), expected an integer"
    assert found["rollout_threads"] == "got True (bool), expected an integer"
    assert found["seed"] == "got 1.5 (float), expected an integer"
    assert found["trainer.optimizer.lr"] == "got 'fast' (str), expected a number"
    assert found["ptq.enabled"] == "got 1 (int), expected true or false"
    assert found["services.policy"] == "got 3 (int), expected a block of keys"
    assert found["ptq.plan.default"].endswith("did you mean int8_dynamic?")


@pytest.mark.parametrize(
    "override",
    [
        "group_size=0", "off_by_n=-1", "local_batch_size=-2", "ptq.guard.max_perplexity_rise=0",
        "ptq.guard.max_perplexity_rise=3", "ptq.guard.max_perplexity_rise=.nan",
        "ptq.calibration.percentile=101", "ptq.calibration.oversample=0.9", "ptq.merge.quorum=0",
        "ptq.merge.sigma_clip=-1", "ptq.smoothing.alpha=1.5", "ptq.drift.max_absmax_ratio=0.5",
        "ptq.sampler.probe_fraction=1", "ptq.deadlines.stage_s=0", "ptq.deadlines.stage_s=.inf",
        "loss.beta=-1", "trainer.optimizer.beta1=1.5", "services.policy.num_replicas=0",
        "trainer.training.steps=0", "ptq.guard.probation.max_left_out=0",
        "ptq.guard.probation.max_left_out=1.1", "trainer.push_rounding=up",
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(override: str) -> None:
    key = override.partition("=")[0]
    message = problems(override)[key]
    assert message.startswith("got ")
    assert "expected" in message


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["trainer.training.seq_len=20"], "trainer.training.seq_len"),
        (["ref_model.training.seq_len=20"], "ref_model.training.seq_len"),
        (["policy.engine_args.max_model_len=20"], "policy.engine_args.max_model_len"),
        (["policy.sampling_params.n=3"], "policy.sampling_params.n"),
        (["policy.sampling_params.max_tokens=4000"], "policy.sampling_params.max_tokens"),
        (["policy.sampling_params.temperature=0.7"], "policy.sampling_params.temperature"),
        (["ref_model.temperature=0.7"], "ref_model.temperature"),
        (["loss.temperature=0.005"], "loss.temperature"),  # vLLM would sample at 0.01
        (["policy.sampling_params.top_p=0.9"], "policy.sampling_params.top_p"),
        (
            ["policy.sampling_params.top_k=5", "loss.rollout_correction=none"],
            "policy.sampling_params.top_k",
        ),
        (["policy.sampling_params.min_tokens=3"], "policy.sampling_params.min_tokens"),
        (["policy.sampling_params.bad_words=[a]"], "policy.sampling_params.bad_words"),
        (["loss.rollout_correction=[tis,icepop]"], "loss.rollout_correction"),
        (["loss.icepop_low=6"], "loss.icepop_low"),
        (
            ["trainer.push_rounding=stochastic", "trainer.training.dtype=bfloat16"],
            "trainer.push_rounding",
        ),
        (["loss.clip_low=0.2"], "loss.rollout_correction"),
        (
            ["loss.clip_low=0.2", "loss.rollout_correction=none", "loss.clip_against=proximal"],
            "loss.clip_against",
        ),
        (["loss.aggregation=fixed_length", "loss.length_divisor=null"], "loss.length_divisor"),
        (["policy.engine_args.enforce_eager=false"], "policy.engine_args.enforce_eager"),
        (
            ["policy.engine_args.enforce_eager=false", "ptq.enabled=false", "debug.inject=[]"],
            "policy.engine_args.enforce_eager",
        ),
        (["policy.engine_args.tensor_parallel_size=2"], "policy.engine_args.tensor_parallel_size"),
        (
            ["policy.engine_args.pipeline_parallel_size=2"],
            "policy.engine_args.pipeline_parallel_size",
        ),
        (["policy.engine_args.data_parallel_size=2"], "policy.engine_args.data_parallel_size"),
        (["policy.engine_args.dtype=float16"], "policy.engine_args.dtype"),
        (["policy.engine_args.async_scheduling=true"], "policy.engine_args.async_scheduling"),
        (["policy.engine_args.quantization=fp8"], "policy.engine_args.quantization"),
        (["policy.engine_args.max_num_seqs=x"], "policy.engine_args.max_num_seqs"),
        (["services.policy.procs=2"], "services.policy.procs"),
        (["replay_buffer.dp_size=2"], "replay_buffer.dp_size"),
        (["replay_buffer.batch_size=3"], "replay_buffer.batch_size"),
        (["replay_buffer.max_policy_age=9"], "replay_buffer.max_policy_age"),
        (["replay_buffer.max_policy_age=0"], "replay_buffer.max_policy_age"),
        (["replay_buffer.max_policy_age=null"], "replay_buffer.max_policy_age"),
        (
            ["trainer.parallelism.pipeline_parallel_degree=2", "actors.trainer.procs=2"],
            "trainer.parallelism.pipeline_parallel_degree",
        ),
        (
            ["trainer.parallelism.context_parallel_degree=2", "actors.trainer.procs=2"],
            "trainer.parallelism.context_parallel_degree",
        ),
        (
            ["ref_model.parallelism.expert_parallel_degree=2"],
            "ref_model.parallelism.expert_parallel_degree",
        ),
        (
            ["trainer.activation_checkpoint.selective_ac_option=2"],
            "trainer.activation_checkpoint.selective_ac_option",
        ),
        (["trainer.checkpoint.initial_load_in_hf=false"], "trainer.checkpoint.initial_load_in_hf"),
        (["services.ref_model.procs=2"], "services.ref_model.procs"),
        (["trainer.training.local_batch_size=5"], "trainer.training.local_batch_size"),
        (["actors.trainer.procs=3"], "actors.trainer.procs"),
        (["actors.dataset.procs=2"], "actors.dataset.procs"),
        (["ptq.probe.min_sequences=1000"], "ptq.probe.min_sequences"),
        (["ptq.sampler.capacity=4"], "ptq.sampler.capacity"),
        (["ptq.sampler.max_tokens=1000"], "ptq.sampler.max_tokens"),
        (["ptq.calibration.rollouts=129"], "ptq.sampler.capacity"),
        (["ptq.plan.mode=auto", "ptq.plan.rollouts=65"], "ptq.sampler.capacity"),
        (["ptq.plan.mode=auto", "ptq.plan.max_evaluations=2"], "ptq.plan.max_evaluations"),
        (["ptq.plan.mode=auto", "ptq.plan.budget=0.03"], "ptq.plan.budget"),
        (["ptq.plan={default: bf16, overrides: {}}"], "ptq.smoothing.enabled"),
        (["ptq.merge.heartbeat_s=60"], "ptq.merge.heartbeat_s"),
        (["ptq.deadlines.calibrate_s=359"], "ptq.deadlines.calibrate_s"),
        (
            ["ptq.deadlines.calibrate_s=179", "ptq.smoothing.enabled=false"],
            "ptq.deadlines.calibrate_s",
        ),
        (
            ["ptq.calibration.oversample=2.1", "services.quantizer.num_replicas=4"],
            "ptq.calibration.oversample",
        ),
        (["ptq.publish_every=3"], "ptq.publish_every"),
        (["off_by_n=0", "ptq.publish_every=2"], "ptq.publish_every"),
        (["debug.inject=[{step: 100000}]"], "debug.inject[0].step"),
        (["debug.inject=[{step: 0}]"], "debug.inject[0].step"),
        (["debug.inject=[{step: 5}, {step: 5}]"], "debug.inject[1].step"),
        (["ptq.guard.on_reject=[keep, bf16]"], "ptq.guard.on_reject"),
        (["ptq.guard.on_reject=[bf16, demote]"], "ptq.guard.on_reject"),
        (["ptq.probe.max_sequences=8"], "ptq.probe.max_sequences"),
        (
            ["ptq.ab.enabled=true", "ptq.precision_by_load.enabled=true"],
            "ptq.precision_by_load.enabled",
        ),
        (["ptq.precision_by_load.bf16_below=99"], "ptq.precision_by_load.bf16_below"),
        (["ptq.enabled=false"], "debug.inject"),
        (["reward.task=gsm_symbolic"], "reward.task"),
        (["dataset.prompt_template=hello"], "dataset.prompt_template"),
        (["model="], "model"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(overrides: list[str], key: str) -> None:
    assert key in problems(*overrides)


def test_the_probe_must_have_rollouts_to_spare() -> None:
    rest = ["local_batch_size=8", "ptq.calibration.rollouts=32"]
    few = [*rest, "ptq.probe.min_sequences=14"]  # 5 steps * 8 * 0.5 = 20
    message = problems(*few)["ptq.probe.min_sequences"]
    assert "about 20" in message
    assert "ptq.sampler.probe_fraction" in message
    load_config(TINY, [*rest, "ptq.probe.min_sequences=13"])
    load_config(TINY, [*few, "ptq.enabled=false", "debug.inject=[]"])


def test_what_depends_on_measured_inputs() -> None:
    def needs(*overrides: str) -> bool:
        return load_config(TINY, overrides).ptq.needs_calibration()

    dynamic = "ptq.plan={default: int8_dynamic, overrides: {'*.down_proj': bf16}}"
    assert needs()
    assert needs(dynamic)  # to be smoothed
    assert not needs(dynamic, "ptq.smoothing.enabled=false")
    assert needs("ptq.plan={mode: auto, default: bf16}", "ptq.smoothing.enabled=false")
    assert not needs("ptq.plan={default: bf16}", "ptq.smoothing.enabled=false")


def test_replicas_that_stand_by_are_half_of_them_at_most() -> None:
    for replicas, oversample in ((1, 1.2), (2, 1.2), (2, 2), (4, 2), (5, 1.6), (128, 1.2)):
        load_config(
            TINY,
            [
                f"ptq.calibration.oversample={oversample}",
                f"services.quantizer.num_replicas={replicas}",
            ],
        )


def test_calibration_must_have_rollouts() -> None:
    few = ["local_batch_size=8", "ptq.probe.min_sequences=5"]  # 5 steps * 8 * 0.5 = 20
    message = problems(*few, "ptq.calibration.rollouts=54")["ptq.calibration.rollouts"]
    assert "about 20" in message
    assert "at most 53.3" in message
    load_config(TINY, [*few, "ptq.calibration.rollouts=53"])
    assert "ptq.calibration.rollouts" in problems(
        *few, "ptq.plan={mode: auto, rollouts: 24}", "ptq.calibration.rollouts=53"
    )


def test_a_publish_may_skip_as_many_versions_as_episodes_may_trail() -> None:
    config = load_config(TINY, ["off_by_n=2", "ptq.publish_every=3", "debug.inject=[]"])
    assert config.replay_buffer.max_policy_age == 2


def test_a_shard_degree_of_minus_one_takes_all_processes() -> None:
    config = load_config(
        TINY,
        [
            "trainer.parallelism.data_parallel_shard_degree=-1", "actors.trainer.procs=4",
            "replay_buffer.dp_size=4",
        ],
    )  # fmt: skip
    assert config.replay_buffer.dp_size == 4


def test_all_problems_come_at_once() -> None:
    found = problems("nonsense", "group_size=x", "model=${oc.env:NOT_SET_ANYWHERE}", "lossy.beta=1")
    assert {"nonsense", "group_size", "model", "lossy"} <= set(found)
    with pytest.raises(ConfigError, match=r"tiny_cpu.yaml: \d+ problems"):
        load_config(TINY, ["nonsense", "group_size=x"])


def test_interpolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("USER", raising=False)
    config = load_config(TINY, ["max_req_tokens=100", "off_by_n=3", "max_res_tokens=30"])
    assert config.trainer.training.seq_len == 130
    assert config.policy.sampling_params["max_tokens"] == 30
    assert config.replay_buffer.max_policy_age == 3
    assert config.metric_logging.wandb is not None
    assert config.metric_logging.wandb.group == "tiny_local"
    monkeypatch.setenv("USER", "ada")
    config = load_config(TINY)
    assert config.metric_logging.wandb is not None
    assert config.metric_logging.wandb.group == "tiny_ada"


def test_overrides() -> None:
    config = load_config(
        TINY,
        [
            "trainer.optimizer.lr=1e-5", "ptq.plan.overrides[*.up_proj]=bf16", "debug.inject=[]",
            "dataset.system_prompt=be brief",
            "policy.sampling_params={n: 8, max_tokens: 5}", "metric_logging.wandb=null",
            "services.policy.env.EXTRA='1'",
        ],
    )  # fmt: skip
    assert config.trainer.optimizer.lr == 1e-5
    assert config.ptq.plan.overrides["*.up_proj"] == "bf16"
    assert config.debug.inject == []
    assert config.metric_logging.wandb is None
    assert config.policy.sampling_params == {"n": 8, "max_tokens": 5}
    assert config.services.policy.env["EXTRA"] == "1"


def test_losses_and_temperatures_that_fit() -> None:
    config = load_config(
        TINY,
        ["loss.temperature=0.7", "loss.rollout_correction=[geometric_mask, tis]",
         "loss.aggregation=fixed_length", "advantages.divide_by_std=false"],
    )  # fmt: skip
    assert config.policy.sampling_params["temperature"] == config.ref_model.temperature == 0.7
    assert config.loss.corrections() == ("geometric_mask", "tis")
    assert config.loss.length_divisor == config.max_res_tokens
    clipped = ["loss.clip_low=0.2", "loss.clip_high=0.28", "loss.rollout_correction=none"]
    assert load_config(TINY, clipped).loss.clip_high == 0.28


def test_split_key() -> None:
    assert split_key("a.b") == ["a", "b"]
    assert split_key('a["*.b"].c') == ["a", "*.b", "c"]
    for bad in ("", "a..b", "a[b", "a.[]"):
        with pytest.raises(ValueError, match=r"key|closed"):
            split_key(bad)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [", "not valid YAML"),
        ("- 1", "block of keys"),
        ("model: 3", "expected text"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=part):
        load_config(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "absent.yaml")


def test_what_is_saved_reads_back_the_same(tmp_path: Path) -> None:
    config = load_config(TINY, ["seed=7"])
    path = save_config(config, tmp_path / "run" / "config.yaml")
    assert load_config(path) == config
    assert from_mapping(RunConfig, config.to_dict()) == config
    assert [p.name for p in path.parent.iterdir()] == ["config.yaml"]


def test_blocks_unpack_like_mappings_of_plain_values() -> None:
    config = load_config(TINY)
    options = dict(**config.services.policy)
    assert options["mesh_name"] == "policy"
    assert type(dict(**config.trainer)["model"]) is dict
    assert config.ptq.get("absent", 3) == 3
    with pytest.raises(KeyError):
        config.ptq["absent"]


def test_errors_survive_a_process_boundary() -> None:
    error = ConfigError([("a.b", "wrong")], "file.yaml")
    again = pickle.loads(pickle.dumps(error))
    assert (again.problems, str(again)) == (error.problems, str(error))


def test_placement_blocks_match_the_runtime() -> None:
    from dataclasses import fields

    from forge_ptq.config import ProcessOptions, ServiceOptions
    from forge_ptq.runtime import ProcessConfig, ServiceConfig

    for ours, theirs in ((ProcessOptions, ProcessConfig), (ServiceOptions, ServiceConfig)):
        defaults = {f.name: f.default for f in fields(theirs)}
        mine = {f.name: f.default for f in fields(ours)}
        assert mine == defaults


def test_blocks_fit_the_actors_they_are_for() -> None:
    import inspect

    from apps.grpo_ptq.tasks import ComputeAdvantages, DatasetActor, RewardActor
    from forge_ptq.loss import GRPOLoss

    config = load_config(TINY)
    for kind, block in (
        (DatasetActor, config.dataset), (RewardActor, config.reward), (GRPOLoss, config.loss),
        (ComputeAdvantages, config.advantages),
    ):  # fmt: skip
        inspect.signature(kind).bind(**block)


def test_importing_the_configuration_is_light() -> None:
    code = "import forge_ptq.config, forge_ptq.observe.report, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    heavy = {"torch", "vllm", "transformers", "wandb", "monarch", "matplotlib", "torchtitan"}
    assert not heavy & set(loaded)


def test_every_option_has_its_docstring() -> None:
    for path, kind, _, doc in rows():
        assert doc.endswith((".", "1.")), path
        assert kind, path
    assert "learning rate" in field_docs(OptimizerConfig)["lr"].lower()


def test_the_documented_table_is_current() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == markdown(), (
        "run: forge-ptq config-table > docs/configuration.md"
    )
