"""A comparison as a table for readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def markdown(result: Mapping[str, Any]) -> str:
    """compare.md of a comparison's numbers (compare.json)."""
    lines = [
        "# Training with quantized rollouts",
        "",
        f"Runs of `{result['base']}`. Means over seeds and half widths of their 95 % intervals.",
        "Final reward: the generator's in the last ten steps. Trained policy: reward of the "
        f"exported weights, computed in fp32. Relative: to arm `{result['reference']}`, by seed. "
        "Perplexity rise: of the candidates that were judged and served, over full precision. "
        "Policy age: versions by which episodes trailed the trainer.",
        "",
        "| arm | runs | final reward | relative | trained policy | relative | policy age | "
        "mismatch k3, nats | lowest ESS | left out | perplexity rise | publishes | tokens/s |",
        "|---" * 13 + "|",
    ]
    for arm in result["arms"].values():
        runs = str(arm["completed"])
        if arm["failed"]:
            runs += f", {arm['failed']} failed"
        outcomes = ", ".join(f"{n} {name}" for name, n in sorted(arm["outcomes"].items()) if n)
        cells = [
            arm["label"],
            runs,
            shown(arm["reward"], "{:.3f}"),
            _of_runs(arm, "relative", "{:.1f} %", 100),
            _of_runs(arm, "evaluated", "{:.3f}"),
            _of_runs(arm, "evaluated_relative", "{:.1f} %", 100),
            shown(arm["policy_age"], "{:.2f}"),
            shown(arm["mismatch_k3"], "{:.2g}"),
            shown(arm["lowest_ess"], "{:.3f}"),
            shown(arm["left_out"], "{:.2f} %", 100),
            shown(arm["perplexity_rise"], "{:.2f} %", 100),
            outcomes or "-",
            shown(arm["tokens_per_s"], "{:.0f}"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", verdict(result), ""]
    if any(arm["evaluated"]["n"] for arm in result["arms"].values()):
        lines += [verdict(result, "evaluated_relative", "reward of the trained policy"), ""]
    lines += [*_reference_curves(result["arms"]), ""]
    for run in result["runs"]:
        if not run["completed"]:
            lines.append(
                f"- `{run['arm']}`, seed {run['seed']}: failed after {run['steps']} steps: "
                f"{run['error']}"
            )
        if run["skipped"]:
            lines.append(
                f"- `{run['arm']}`, seed {run['seed']}: {run['skipped']} of {run['steps']} steps "
                "changed nothing, since their loss or gradient was not finite"
            )
    return "\n".join(lines).rstrip() + "\n"


def _of_runs(arm: Mapping[str, Any], name: str, form: str, times: float = 1.0) -> str:
    """With the number of seeds where it is not that of all completed runs."""
    text, n = shown(arm[name], form, times), arm[name]["n"]
    return f"{text} ({n} seeds)" if 0 < n < arm["completed"] else text


def _reference_curves(arms: Mapping[str, Any]) -> list[str]:
    """Rows to hold one's own run against: what single runs came to, not only their mean."""
    longest: list[Any] = max((arm["windows"] for arm in arms.values()), key=len, default=[])
    if not longest:
        return []
    lines = [
        "Mean reward by steps, over the runs (lowest to highest run):",
        "",
        "| arm | " + " | ".join(f"{w['first']}-{w['last']}" for w in longest) + " |",
        "|---" * (1 + len(longest)) + "|",
    ]
    for arm in arms.values():
        cells = [
            f"{w['mean']:.2f} ({w['low']:.2f}-{w['high']:.2f})" if w["n"] else "-"
            for w in arm["windows"]
        ]
        cells += ["-"] * (len(longest) - len(cells))
        lines.append("| " + " | ".join([arm["label"], *cells]) + " |")
    return lines


def shown(value: Mapping[str, Any], form: str, times: float = 1.0) -> str:
    """ "0.91 ± 0.02"; without the interval where there is none; "-" for nothing."""
    if value["mean"] is None:
        return "-"
    text = form.format(times * value["mean"])
    if value["half"] is None:
        return text
    number, _, unit = text.partition(" ")
    half = form.format(times * value["half"]).partition(" ")[0]
    return f"{number} ± {half}" + (f" {unit}" if unit else "")


def verdict(result: Mapping[str, Any], key: str = "relative", what: str = "final reward") -> str:
    """Whether the default arm reached the share of the reference's reward that was asked for."""
    default = result["arms"].get(result["default"])
    wanted = result["agreement"]
    if default is None or default[key]["mean"] is None:
        return f"`{result['default']}` and the reference have no pair of runs to compare: {what}."
    relative = default[key]
    share, half = relative["mean"], relative["half"]
    text = f"`{result['default']}` reached {100 * share:.1f} % of the reference's {what}"
    if half is None:
        return f"{text} with one seed; asked for: {100 * wanted:g} %."
    low, high = 100 * (share - half), 100 * (share + half)
    text += f" ({relative['n']} seeds, 95 % interval {low:.1f} to {high:.1f} %); "
    text += f"asked for: {100 * wanted:g} %, "
    if low >= 100 * wanted:
        return text + "the whole interval is over it."
    if high < 100 * wanted:
        return text + "the whole interval is under it."
    return text + f"which lies within the interval; the mean is {_side(share, wanted)} it."


def _side(share: float, wanted: float) -> str:
    return "over" if share >= wanted else "under"
