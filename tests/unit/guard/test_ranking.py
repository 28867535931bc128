"""Which layers are demoted first, what the artifact says of them, and how many codes flip."""

import pytest
import torch

from forge_ptq import store
from forge_ptq.numerics.calibration import Calibration
from forge_ptq.numerics.plan import QuantPlan, group_of
from forge_ptq.numerics.schemes import get_scheme
from forge_ptq.services.code_flips import SAMPLED, CodeFlips
from forge_ptq.services.ladder import BETTER, overlaid, pick
from forge_ptq.services.planning import rank_moves
from forge_ptq.services.policy_batches import make_batches
from forge_ptq.services.policy_copy import PolicyCopy
from forge_ptq.services.policy_quantize import relative_error
from forge_ptq.services.ranks import Ranks
from forge_ptq.services.work import PartDone, Quantize, Rank, RankDone
from forge_ptq.services.workbench import Progress, Workbench
from forge_ptq.store_artifacts import ArtifactPart
from tests.integration.ptq_support import random_rollouts
from tests.models import tiny_model

MIXED = {"*.o_proj": "int8_static", "*.0.mlp.down_proj": "bf16", "*.q_proj": "int8_static",
         "*.k_proj": "int8_static", "*.v_proj": "int8_static"}  # fmt: skip


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def policy(request):
    return PolicyCopy(tiny_model(request.param), QuantPlan.from_config("int8_dynamic", MIXED))


def calibrated(policy: PolicyCopy, layers: dict[str, str] | None = None) -> Calibration:
    rollouts = [r for r in random_rollouts(12) if max(r.token_ids) >= 0]
    for rollout in rollouts:
        rollout.token_ids[:] = [token % 64 for token in rollout.token_ids]
    stats = policy.observe(make_batches(rollouts))
    ranges = {n: stats[site].absmax for site, members in policy.sites.items() for n in members}
    return Calibration(3, 1, layers or policy.layers, ranges, stats=stats)


def check(policy: PolicyCopy, moves, planned: dict[str, str]) -> None:
    """Whole groups, each from where it stands, better every time, all the way to bf16."""
    schemes = dict(planned)
    for move in moves:
        assert move.layers == group_of(move.layers[0])
        assert {schemes[name] for name in move.layers} == {move.old}
        assert BETTER[move.new] > BETTER[move.old]
        schemes |= dict.fromkeys(move.layers, move.new)
    assert set(schemes.values()) == {"bf16"}
    size = {name: policy.parameters[f"{name}.weight"].numel() for name in policy.layers}
    for move in moves:
        expected = sum(size[name] for name in move.layers) / sum(size.values())
        assert move.flops == pytest.approx(expected)


def test_by_the_calibration_what_gains_most_comes_first(policy):
    moves = rank_moves(policy, calibrated(policy), {})
    check(policy, moves, policy.layers)
    assert any(move.old == "int8_static" for move in moves)
    # The order is that of error removed per cost: blow one layer's inputs up for static ranges.
    calibration = calibrated(policy)
    wide = "model.layers.1.self_attn.o_proj"
    calibration.absmax[wide] = 1000 * calibration.absmax[wide]  # type: ignore[index]
    first = rank_moves(policy, calibration, {})[0]
    assert (first.layers, first.old) == ((wide,), "int8_static")
    assert pick([first], 0.01) == {wide: first.new}


def test_what_is_demoted_already_goes_on_from_there(policy):
    calibration = calibrated(policy)
    overlay: dict[str, str] = {}
    seen = []
    while step := pick(rank_moves(policy, calibration, overlay), 0.3):
        before = overlaid(policy.layers, overlay)
        overlay |= step
        after = overlaid(policy.layers, overlay)
        assert all(BETTER[after[name]] > BETTER[before[name]] for name in step)
        seen.append(step)
    assert set(overlaid(policy.layers, overlay).values()) == {"bf16"}
    assert 3 <= len(seen) <= 8


def test_without_a_calibration_by_class_and_weight_error():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = 5.0  # one large weight takes all codes
    policy = PolicyCopy(model, QuantPlan.from_config("int8_dynamic"))
    moves = rank_moves(policy, None, {})
    check(policy, moves, policy.layers)
    leaves = [move.layers[0].rpartition(".")[2] for move in moves]
    assert leaves == ["down_proj"] * 2 + ["o_proj"] * 2 + ["gate_proj"] * 2 + ["q_proj"] * 2
    assert moves[0].layers == ("model.layers.1.mlp.down_proj",)


def test_an_input_that_was_never_seen_is_ranked_all_the_same(policy):
    calibration = calibrated(policy)
    site = "model.layers.0.self_attn.o_proj"
    calibration.absmax[site] = 0.0  # type: ignore[index]
    check(policy, rank_moves(policy, calibration, {}), policy.layers)


# ---- through the workbench


async def bench_of(policy: PolicyCopy, monkeypatch) -> Workbench:
    async def run(work):
        return work()

    async def keep(artifact_id, name, tensors):
        kept[name] = tensors
        return ArtifactPart(name, {}, 0)

    kept: dict[str, dict[str, torch.Tensor]] = {}
    monkeypatch.setattr(store, "put_artifact_part", keep)
    bench = Workbench(policy, Ranks(), "host:1", run)
    bench.kept = kept  # type: ignore[attr-defined]
    return bench


@pytest.mark.parametrize("parts", [1, 3])
async def test_an_overlay_changes_the_layers_it_improves_and_says_so(policy, monkeypatch, parts):
    bench = await bench_of(policy, monkeypatch)
    calibration = bench._calibration = calibrated(policy)
    policy.version = 4
    moves = await bench.carry_out(Rank(4, 3, {}), 0, Progress(bench.ranks))
    assert isinstance(moves, RankDone)
    overlay = pick(moves.moves, 0.4)
    idle = "model.layers.0.mlp.down_proj"
    done: list[PartDone] = []
    for part in range(parts):
        work = Quantize(4, "a", part, parts, None, 3, overlay=overlay | {idle: "int8_dynamic"})
        result = await bench.carry_out(work, 0, Progress(bench.ranks))
        assert isinstance(result, PartDone)
        done.append(result)
    used = {name: scheme for each in done for name, scheme in each.used.items()}
    asked = {name: scheme for each in done for name, scheme in each.asked.items()}
    notes = {name: note for each in done for name, note in each.notes.items()}
    errors = {name: error for each in done for name, error in each.weight_error.items()}
    assert asked == policy.layers
    assert used == overlaid(policy.layers, overlay)
    assert used[idle] == "bf16"
    assert set(notes) == set(overlay)
    assert all(note.endswith(": demoted") for note in notes.values())
    expected, plain, _ = policy.quantize(used, calibration)
    assert plain == used
    made = {name: t for tensors in bench.kept.values() for name, t in tensors.items()}  # type: ignore[attr-defined]
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], expected[name]) for name in expected)
    for name, error in errors.items():
        weight_NK = policy.parameters[f"{name}.weight"].double()
        parts_of = {p: made[f"{name}.{p}"] for p in ("weight", "weight_scale")}
        dequantized_NK = parts_of["weight"].double() * parts_of["weight_scale"].double()
        norm = (weight_NK - dequantized_NK).norm() / weight_NK.norm()
        assert error == pytest.approx(float(norm), rel=1e-4)
    assert set(errors) == {name for name, scheme in used.items() if scheme != "bf16"}
    assert sum(each.codes_compared for each in done) == 0


async def test_one_scheme_for_all_takes_no_overlay(policy, monkeypatch):
    bench = await bench_of(policy, monkeypatch)
    policy.version = 4
    work = Quantize(4, "a", 0, 1, "int8_dynamic", None, overlay={"model.layers.0.mlp.down_proj": "bf16"})  # fmt: skip  # noqa: E501
    result = await bench.carry_out(work, 0, Progress(bench.ranks))
    assert isinstance(result, PartDone)
    assert set(result.used.values()) == {"int8_dynamic"}


# ---- codes


def quantized(weight_NK: torch.Tensor) -> dict[str, torch.Tensor]:
    parts = get_scheme("int8_dynamic").quantize(weight_NK)
    return {f"a.{name}": tensor for name, tensor in parts.items()}


def test_flips_are_counted_against_the_version_before():
    flips = CodeFlips()
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    first = quantized(weight)
    assert flips.compare(1, first) == (0, 0)
    changed = {**first, "a.weight": first["a.weight"].clone()}
    changed["a.weight"][2, :5] ^= 1
    assert flips.compare(2, changed) == (5, 128)
    assert flips.compare(2, first) == (0, 128), "another candidate of 2 is compared with 1"
    assert flips.compare(2, {"a.weight": weight.bfloat16()}) == (0, 0)
    assert flips.compare(3, changed) == (5, 128), "and 3 with the last of 2"
    assert flips.compare(4, {"a.weight": first["a.weight"][:4]}) == (0, 0), "another shape"


def test_large_layers_are_sampled_evenly():
    flips = CodeFlips()
    codes = torch.zeros(3 * SAMPLED + 17, 1, dtype=torch.int8)
    flips.compare(1, {"a.weight": codes})
    other = codes.clone()
    other[: len(codes) // 2] = 1
    changed, compared = flips.compare(2, {"a.weight": other})
    assert SAMPLED // 2 <= compared <= SAMPLED
    assert changed / compared == pytest.approx(0.5, abs=0.001)


def test_relative_error_of_zeros():
    zeros = torch.zeros(3, 4)
    assert relative_error(zeros, zeros) == 0.0
    assert relative_error(zeros, torch.ones(3, 4)) == 1.0
    assert relative_error(torch.ones(3, 4), zeros) == pytest.approx(1.0)
