"""summary.png: reward and perplexity rise over the steps, with swaps and refusals marked."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .summary import SWAPPED, counts, is_number, mean, was_refused

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOW = 5
"""Steps in the running mean of the reward."""

INK, MUTED = "#1f2933", "#7b8794"
REWARD, RISE, ACCEPTED, REFUSED, LIMIT = "#2563a8", "#6b4f9e", "#1a7f4b", "#c2321f", "#b7791f"


def draw(summary: Mapping[str, Any], path: Path) -> Path:
    """Draws the run that `summary` (summary.json) describes; also one that ended before a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = [r for r in summary.get("history", []) if is_number(r.get("reward"))]
    publishes = list(summary.get("publishes", []))
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(10, 7), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.png")
    try:
        _title(figure, summary)
        _reward(above, steps, publishes, list(summary.get("rollbacks", [])))
        _rise(below, publishes, summary.get("max_perplexity_rise"))
        _steps_axis(below, summary.get("history", []), publishes)
        figure.savefig(temporary, dpi=130)
        os.replace(temporary, path)
    finally:
        plt.close(figure)
        temporary.unlink(missing_ok=True)
    return path


def _title(figure: Any, summary: Mapping[str, Any]) -> None:
    text = f"{summary.get('steps', 0)} steps, INT8 swaps: {counts(summary)}"
    figure.suptitle(f"{summary.get('run', 'run')}\n{text}", fontsize=12, color=INK)
    if summary.get("status") not in ("completed", None):
        text = f"run {summary['status']}"
        figure.text(0.99, 0.985, text, ha="right", va="top", color=REFUSED, fontsize=10)


def _style(axes: Axes, label: str) -> None:
    axes.set_ylabel(label, color=INK)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.tick_params(colors=INK)


def _empty(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=MUTED, fontsize=11)


def _reward(axes: Axes, steps: list[Any], publishes: list[Any], rollbacks: list[Any]) -> None:
    _style(axes, "mean reward")
    if not steps:
        _empty(axes, "no training step with a reward")
        return
    x = [r["step"] for r in steps]
    y = [r["reward"] for r in steps]
    running = [mean(y[max(0, i - WINDOW + 1) : i + 1]) or 0.0 for i in range(len(y))]
    axes.plot(x, y, "o", markersize=4, color=REWARD, alpha=0.4, label="each step")
    axes.plot(x, running, color=REWARD, linewidth=2.2, label=f"mean of {WINDOW} steps")
    # Swaps as ticks along the foot, refusals and rollbacks as lines through the panel.
    low, high = min(0.0, min(y)), max(y)
    axes.set_ylim(low - 0.04 * (high - low or 1.0), high + 0.06 * (high - low or 1.0))
    across = axes.get_xaxis_transform()
    by_kind = {
        kind: [p["version"] for p in publishes if _kind(p) == kind]
        for kind in ("accepted", "refused", "in bf16", "failed")
    }
    climbed = [p["version"] for p in publishes if p["verdict"] in SWAPPED and was_refused(p)]
    for at, marker, color, label in (
        (by_kind["accepted"], "^", ACCEPTED, "swapped in"),
        (climbed, "D", LIMIT, "refused, then demoted"),
        (by_kind["refused"], "x", REFUSED, "refused"),
        (by_kind["in bf16"], "o", MUTED, "served in bf16"),
        (by_kind["failed"], "s", MUTED, "publish failed"),
        ([r["step"] for r in rollbacks], "v", REFUSED, "taken back"),
    ):
        if not at:
            continue
        axes.scatter(
            at, [0.03] * len(at), marker=marker, s=42, color=color, transform=across,
            label=label, zorder=4, clip_on=False,
        )  # fmt: skip
        if color in (REFUSED, LIMIT):
            for version in at:
                axes.axvline(version, color=color, linewidth=1.0, linestyle=":", alpha=0.8)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=5,
        frameon=False,
        fontsize=9,
        handletextpad=0.4,
    )


def _rise(axes: Axes, publishes: list[Any], limit: float | None) -> None:
    _style(axes, "perplexity rise, %")
    good = [p for p in publishes if _kind(p) == "accepted" and is_number(p.get("perplexity_rise"))]
    bad = [p for p in publishes if was_refused(p)]
    if limit is not None:
        axes.axhline(100 * limit, color=LIMIT, linewidth=1.4, linestyle="--")
    if not good and not bad:
        _empty(axes, "no candidate was judged")
        return
    last = max(p["version"] for p in publishes)
    reach = [100 * p["perplexity_rise"] for p in good] or [0.0]
    top = 1.7 * max(*reach, 100 * (limit or 0.0), 0.1)
    bottom = min(0.0, 1.2 * min(reach))
    axes.plot(
        [p["version"] for p in good], [100 * p["perplexity_rise"] for p in good],
        "-o", color=RISE, linewidth=1.6, markersize=5, label="served",
    )  # fmt: skip
    for p in bad:
        # A corrupted candidate can be off by orders of magnitude: those are clipped and labelled,
        # and so is one whose scores are not numbers.
        rise = _refused_rise(p)
        value = math.inf if rise is None else 100 * rise
        shown = min(value, 0.93 * top)
        axes.plot([p["version"]], [shown], "x", color=REFUSED, markersize=9, markeredgewidth=2)
        late = p["version"] > 0.6 * last
        text = "refused" if rise is None else f"{_percent(value)} refused"
        axes.annotate(
            text + (" (off the scale)" if value > shown else ""),
            (p["version"], shown), xytext=(-8 if late else 8, 0), textcoords="offset points",
            ha="right" if late else "left", va="center", color=REFUSED, fontsize=9,
        )  # fmt: skip
        axes.axvline(p["version"], color=REFUSED, linewidth=1.0, linestyle=":", alpha=0.8)
    axes.set_ylim(bottom, top)
    if limit is not None:
        axes.annotate(
            f"limit {100 * limit:g} %", (1.0, 100 * limit), xycoords=("axes fraction", "data"),
            xytext=(-2, 4), textcoords="offset points", ha="right", color=LIMIT, fontsize=9,
        )  # fmt: skip


def _refused_rise(publish: Mapping[str, Any]) -> float | None:
    """Perplexity rise of the worst candidate refused; in records of older runs, which have it of
    the last one only where nothing quantized served, that one's."""
    rise = publish.get("refused_rise")
    if rise is None and publish["verdict"] not in SWAPPED:
        rise = publish.get("perplexity_rise")
    return float(rise) if rise is not None and is_number(rise) else None


def _percent(value: float) -> str:
    return f"{value:.3g} %" if value < 1000 else f"{value:.1e} %"


def _steps_axis(axes: Axes, steps: list[Any], publishes: list[Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    last = max([r["step"] for r in steps] + [p["version"] for p in publishes], default=1)
    axes.set_xlim(0, max(last, 1) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("training step = policy version", color=INK)


def _kind(publish: Mapping[str, Any]) -> str:
    """accepted, refused (judged and turned down), in bf16 (right away) or failed (never judged)."""
    if publish["verdict"] in SWAPPED:
        return "accepted"
    if was_refused(publish):
        return "refused"
    return "in bf16" if publish["verdict"] == "fell_back" else "failed"
