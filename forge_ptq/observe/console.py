"""What a person sees while a run goes on: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .summary import SWAPPED, counts, is_number, mean, was_refused

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

BARS = "▁▂▃▄▅▆▇█"


def number(value: Any, form: str = ".3f", none: str = "-") -> str:
    """`value` formatted, or `none` where it is not a finite number."""
    return format(value, form) if is_number(value) else none


def percent(value: Any) -> str:
    """A share in percent, in few characters: 0.0123 -> 1.23 %."""
    if not is_number(value):
        return "-"
    return f"{100 * value:.2f} %" if abs(value) < 10 else f"{100 * value:.1e} %"


def sparkline(values: list[Any], width: int = 40) -> str:
    """The last `width` numbers as bars from their lowest to their highest."""
    numbers = [float(v) for v in values if is_number(v)][-width:]
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] for v in numbers)


def publish_line(record: Mapping[str, Any]) -> str:
    """One publish in one line."""
    verdict, rise = record["verdict"], record.get("perplexity_rise")
    text = f"version {record['version']}: {verdict}"
    if is_number(rise) and verdict in SWAPPED:
        text += f", perplexity rise {percent(rise)}, KL {number(record.get('kl'), '.2g')}"
    timings = [
        f"{name} {number(record[key], '.2f')} s"
        for name, key in (("calibrate", "calibrate_s"), ("stage", "stage_s"), ("probe", "probe_s"))
        if is_number(record.get(key))
    ]
    if is_number(record.get("pause_s")):
        timings.append(f"longest gap {1000 * record['pause_s']:.0f} ms")
    if timings and verdict in SWAPPED:
        text += " (" + ", ".join(timings) + ")"
    if verdict != "accepted" and record.get("reason"):
        text += f": {record['reason']}"
    return text


def serving_version(summary: Mapping[str, Any]) -> int:
    """The policy version that serves, in whatever precision; 0 is the starting checkpoint."""
    served = [p["version"] for p in summary.get("publishes", []) if p["verdict"] != "kept"]
    version = served[-1] if served else 0
    # After a training step what serves is judged first, and then the step's version published.
    back = [r["version_to"] for r in summary.get("rollbacks", [])[-1:] if r["step"] > version]
    return int(back[0] if back else version)


def calibration_line(record: Mapping[str, Any]) -> str:
    """The calibration that a publish made, in one line: why, by whom, and the plan that came."""
    text = f"calibrated ({record.get('calibration_reason')}) on {record.get('calibration_tokens')}"
    text += f" tokens by {len(record.get('contributors') or ())} replicas"
    if record.get("dropped"):
        text += f", without {', '.join(record['dropped'])}"
    if is_number(record.get("predicted_rise")):
        text += f", plan predicts {percent(record['predicted_rise'])}"
    return f"{text}; {shares(record)}"


def shares(record: Mapping[str, Any]) -> str:
    """Where the FLOPs of the linear layers go, by scheme."""
    share = record.get("flop_share") or {}
    names = {"int8_static": "static", "int8_dynamic": "dynamic", "bf16": "bf16"}
    parts = [f"{100 * share[key]:.0f} % {name}" for key, name in names.items() if share.get(key)]
    return " ".join(parts) or "no plan"


class ConsoleView:
    """Implements report.View. Call `start` before and `stop` after; both may be repeated."""

    def __init__(
        self, title: str, total_steps: int, limit: float | None, console: Console | None = None
    ) -> None:
        """`limit`: largest perplexity rise that the gate lets pass."""
        if console is None:
            from rich.console import Console

            console = Console(highlight=False)
        self.console = console
        self.live_view = console.is_terminal and not console.is_dumb_terminal
        self._title, self._total, self._limit = title, total_steps, limit
        self._snapshot: Mapping[str, Any] = {}
        self._status = "starting"
        self._begin = time.monotonic()
        self._live: Any = None

    # ---- report.View ---- #

    def start(self) -> None:
        """Begins to show."""
        self._begin = time.monotonic()
        if self.live_view and self._live is None:
            from rich.live import Live

            self._live = Live(
                get_renderable=self.render, console=self.console, refresh_per_second=4,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self._live.start()

    def stop(self) -> None:
        """Leaves the last picture on the screen."""
        if self._live is not None:
            live, self._live = self._live, None
            live.update(self.render(), refresh=True)
            live.stop()

    def note(self, text: str) -> None:
        """A line about what goes on; the live view also keeps the last one."""
        self._status = text
        self._line(text)

    def show(self, snapshot: Mapping[str, Any]) -> None:
        """Takes the newest summary."""
        self._snapshot = snapshot

    def step(self, record: Mapping[str, Any]) -> None:
        """One training step has ended."""
        self._status = "training"
        if not self.live_view:
            parts = [f"step {record['step']}/{self._total}", f"reward {number(record['reward'])}"]
            if "loss" in record:
                parts.append(f"loss {number(record['loss'], '.4f')}")
            parts.append(f"{record['tokens']} tokens")
            self._line("  ".join(parts))

    def publish(self, record: Mapping[str, Any]) -> None:
        """One candidate has been judged."""
        if record.get("calibrated"):
            self._line(f"version {record['version']}: {calibration_line(record)}")
        if not self.live_view or record["verdict"] != "accepted":
            self._line(publish_line(record))

    # ---- drawing ---- #

    def _line(self, text: str) -> None:
        elapsed = time.monotonic() - self._begin
        self.console.print(f"[{elapsed:6.1f} s] {text}", markup=False, soft_wrap=True)

    def render(self) -> RenderableType:
        """The panel of the live view."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        snap = self._snapshot
        history, publishes = snap.get("history", []), snap.get("publishes", [])
        done = history[-1]["step"] if history else 0
        elapsed = time.monotonic() - self._begin

        progress = Table.grid(padding=(0, 1), expand=True)
        progress.add_column(no_wrap=True)
        progress.add_column(ratio=1)
        progress.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=max(self._total, 1), completed=done)
        progress.add_row(f"step {done}/{self._total}", bar, f"{elapsed:.0f} s  {self._status}")

        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column(overflow="fold")
        rewards = [r["reward"] for r in history]
        facts.add_row(
            "reward",
            f"{number(rewards[-1] if rewards else None)}   "
            f"last ten {number(mean(rewards[-10:]))}   {sparkline(rewards)}",
        )
        rise = publishes[-1].get("perplexity_rise") if publishes else None
        over = rise is not None and self._limit is not None and rise > self._limit
        facts.add_row(
            "perplexity rise",
            Text.assemble(
                (percent(rise), "red" if over else "green" if is_number(rise) else ""),
                f"   limit {percent(self._limit)}",
            ),
        )
        facts.add_row("INT8 swaps", self._swaps(snap))
        facts.add_row(
            "generation",
            f"{number(snap.get('tokens_per_s'), ',.0f')} tokens/s   "
            f"{snap.get('tokens', 0):,} tokens",
        )
        facts.add_row("seconds", self._phases(snap.get("phases", {})))
        return Panel(Group(progress, Text(""), facts), title=self._title, border_style="dim")

    @staticmethod
    def _swaps(snap: Mapping[str, Any]) -> Any:
        from rich.text import Text

        demoted, refused, failed = (snap.get(k, 0) for k in ("demoted", "refused", "failed"))
        return Text.assemble(
            (f"{snap.get('accepted', 0)} accepted", "green"),
            (f"   {demoted} demoted", "yellow") if demoted else "",
            "   ",
            (f"{refused} refused", "red" if refused else ""),
            (f"   {failed} failed", "yellow") if failed else "",
            f"   serving version {serving_version(snap)}",
        )

    @staticmethod
    def _phases(phases: Mapping[str, Any]) -> str:
        """The longest phases, slowest first."""
        ranked = sorted(phases.items(), key=lambda item: -item[1]["seconds"])[:5]
        return "   ".join(f"{name} {values['seconds']:.1f}" for name, values in ranked) or "-"


def print_summary(summary: Mapping[str, Any], folder: str, console: Console | None = None) -> None:
    """The closing lines of a run: what came out and where it is."""
    from rich.console import Console
    from rich.table import Table

    console = console or Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    status = str(summary["status"])
    table.add_row("run", status + (f": {summary['error']}" if summary.get("error") else ""))
    table.add_row("steps", f"{summary['steps']} in {number(summary['wall_s'], '.0f')} s")
    table.add_row(
        "reward",
        f"{number(summary['reward_first10'])} in the first ten steps, "
        f"{number(summary['reward_last10'])} in the last ten",
    )
    table.add_row("INT8 swaps", counts(summary))
    rises = [p.get("perplexity_rise") for p in summary["publishes"] if p["verdict"] in SWAPPED]
    served = [r for r in rises if is_number(r)]
    if served:
        table.add_row(
            "perplexity rise", f"{percent(mean(served))} mean, {percent(max(served))} highest"
        )
    calibrated = [p for p in summary["publishes"] if p.get("calibrated")]
    if calibrated:
        count = summary.get("calibrations", len(calibrated))
        seconds = number(summary.get("calibrate_s"), ".1f")
        text = f"{count} in {seconds} s; the last: {shares(calibrated[-1])}"
        table.add_row("calibrations", text)
    for record in summary["publishes"]:
        if record["verdict"] not in SWAPPED:
            label = "not served" if record["verdict"] == "kept" else "served in bf16"
            table.add_row(label, publish_line(record))
        elif was_refused(record):
            table.add_row("refused at first", publish_line(record))
    for record in summary.get("rollbacks", []):
        table.add_row("taken back", f"after step {record['step']}: {record['reason']}")
    table.add_row("generation", f"{number(summary['tokens_per_s'], ',.0f')} tokens/s")
    table.add_row("results", folder)
    console.print()
    console.print(table)
