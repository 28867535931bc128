"""A comparison as a picture: reward, mismatch, perplexity rise and throughput, with bands."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SMOOTH = 5
"""Steps in the running mean of the reward."""
COLORS = ("#1f2933", "#c2321f", "#2563a8", "#1a7f4b", "#b7791f", "#6b4f9e", "#0e7490", "#9d174d")
FLOOR = 1e-5
"""Where next to nothing is drawn on the logarithmic axes, nats or percent."""


def draw(result: Mapping[str, Any], groups: Mapping[str, str], path: Path) -> Path:
    """Draws compare.json, one column per group of arms; the reference is in every column."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = list(dict.fromkeys(groups.values()))
    figure, axes = plt.subplots(
        4, len(columns), figsize=(7.5 * len(columns), 13), squeeze=False, layout="constrained",
        sharey="row", height_ratios=(4, 3, 2.5, 2),
    )  # fmt: skip
    temporary = path.with_name(f".{path.name}.{os.getpid()}.png")
    try:
        colors = colors_of(groups, result["reference"])
        for column, group in enumerate(columns):
            arms = {
                name: arm
                for name, arm in result["arms"].items()
                if groups[name] == group or name == result["reference"]
            }
            above, mismatch, rise, speed = axes[:, column]
            above.set_title(group)
            for name, arm in arms.items():
                failed = f", {arm['failed']} failed" if arm["failed"] else ""
                label = f"{arm['label']} ({arm['completed']}{failed})"
                _band(above, arm["curves"]["reward"], colors[name], label, smooth=SMOOTH)
                _band(mismatch, arm["curves"]["mismatch_k3"], colors[name], floor=FLOOR)
                _band(rise, arm["rises"], colors[name], times=100, floor=FLOOR)
            mismatch.set_yscale("log")
            rise.set_yscale("log")
            title = "arm (seeds); bands: 95 %, of two seeds both"
            above.legend(frameon=False, fontsize=8, loc="best", title=title)
            _bars(speed, arms, colors)
        texts = ("mean reward", "mismatch k3, nats", "perplexity rise, %", "tokens/s")
        for row, text in enumerate(texts):
            axes[row][0].set_ylabel(text)
            for one in axes[row]:
                one.grid(axis="y", color="#e4e7eb", linewidth=0.8)
                one.set_axisbelow(True)
                one.spines[["top", "right"]].set_visible(False)
                if row < 3:
                    one.set_xlabel("training step")
        figure.savefig(temporary, dpi=110)
        os.replace(temporary, path)
    finally:
        plt.close(figure)
        temporary.unlink(missing_ok=True)
    return path


def colors_of(groups: Mapping[str, str], reference: str) -> dict[str, str]:
    """A color for every arm, told apart from those that share its column."""
    colors, used = {reference: COLORS[0]}, dict.fromkeys(groups.values(), 0)
    for arm, group in groups.items():
        if arm != reference:
            colors[arm] = COLORS[1 + used[group] % (len(COLORS) - 1)]
            used[group] += 1
    return colors


def _band(
    axes: Any,
    curve: list[dict[str, Any]],
    color: str,
    label: str | None = None,
    *,
    smooth: int = 1,
    times: float = 1.0,
    floor: float | None = None,
) -> None:
    points = [p for p in curve if p["mean"] is not None]
    if not points:
        if label is not None:
            axes.plot([], [], color=color, label=label)
        return
    steps = [p["step"] for p in points]
    means = _running([times * p["mean"] for p in points], smooth)
    low, high = (
        _running([times * end for end in ends], smooth)
        for ends in zip(*(band(p) for p in points), strict=True)
    )
    if floor is not None:
        means, low, high = ([max(v, floor) for v in values] for values in (means, low, high))
    axes.plot(steps, means, color=color, linewidth=1.7, label=label)
    axes.fill_between(steps, low, high, color=color, alpha=0.13, linewidth=0)


def band(estimate: Mapping[str, Any]) -> tuple[float, float]:
    """The 95 % interval, or of fewer than three runs the lowest and the highest: an interval from
    two is thirteen times as wide, which says nothing but that they are two."""
    if estimate["n"] < 3:
        return estimate["low"], estimate["high"]
    return estimate["mean"] - estimate["half"], estimate["mean"] + estimate["half"]


def _running(values: list[float], window: int) -> list[float]:
    """Means over the last `window` values; of a band that is a bound, as if steps were wholly
    dependent."""
    parts = [values[max(0, i - window + 1) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def _bars(axes: Any, arms: Mapping[str, Any], colors: Mapping[str, str]) -> None:
    shown = [(name, arm) for name, arm in arms.items() if arm["tokens_per_s"]["mean"] is not None]
    means = [arm["tokens_per_s"]["mean"] for _, arm in shown]
    bands = [band(arm["tokens_per_s"]) for _, arm in shown]
    axes.bar(
        [arm["label"] for _, arm in shown],
        means,
        yerr=[
            [m - low for m, (low, _) in zip(means, bands, strict=True)],
            [high - m for m, (_, high) in zip(means, bands, strict=True)],
        ],
        color=[colors[name] for name, _ in shown],
        ecolor="#7b8794",
        capsize=3,
        width=0.6,
    )
    axes.tick_params(axis="x", labelrotation=20, labelsize=8)
