"""From the command line to a run's folder and an exit code, whatever happens in between."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from forge_ptq.config import ConfigError, RunConfig, load_config, save_config, to_plain, to_yaml
from forge_ptq.observe.console import ConsoleView, print_summary
from forge_ptq.observe.report import RunReport
from forge_ptq.observe.run_dir import RunDir, create_run_dir

FAILED, BAD_CONFIG, INTERRUPTED = 1, 2, 130

log = logging.getLogger(__name__)

Main = Callable[[RunConfig, RunReport], Coroutine[Any, Any, None]]


def run_app(main: Main, usage: str, argv: list[str] | None = None) -> int:
    """Exit code of one run: 0 done, 1 failed, 2 bad configuration, 130 interrupted.

    The console shows our own lines only. What libraries print goes to the run's `logs/`.
    """
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        description=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    arguments = parser.parse_args(argv)
    try:
        cfg = load_config(arguments.config, arguments.overrides)
        require_model(cfg.model)
        run_dir = create_run_dir(cfg.output_dir, cfg.run_name, arguments.config)
    except (ConfigError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return BAD_CONFIG
    save_config(cfg, run_dir.config)
    print(to_yaml(cfg))
    keep_third_parties_quiet(run_dir)

    limit = cfg.ptq.guard.max_perplexity_rise if cfg.ptq.enabled else None
    view = ConsoleView(run_dir.name, cfg.trainer.training.steps, limit)
    report = RunReport(run_dir, to_plain(cfg), view, started=started)
    code = supervise(main, cfg, report)
    print_summary(report.summary(), str(run_dir.path))
    if code == FAILED:
        print(f"logs: {run_dir.logs}", file=sys.stderr)
    if code in (FAILED, INTERRUPTED) and cfg.trainer.checkpoint.enable:
        others = [o for o in arguments.overrides if not o.startswith("run_name=")]
        command = ["python", "-m", "apps.grpo_ptq.main", "--config", arguments.config]
        command += [*others, f"run_name={run_dir.name}"]
        print(f"resume: {shlex.join(command)}", file=sys.stderr)
    return code


def supervise(main: Main, cfg: RunConfig, report: RunReport) -> int:
    """Runs `main` to its end and writes the summary: status, and for a failure its cause."""
    from forge_ptq import runtime

    report.start()
    try:
        code = runtime.run(main(cfg, report))
    except Exception as error:
        log.exception("the run failed")  # into logs/client.log
        cause = first_cause(error)
        report.finish("failed", f"{type(cause).__name__}: {cause}")
        return FAILED
    if code == INTERRUPTED:
        report.finish("interrupted")
        return INTERRUPTED
    report.finish("completed")
    return 0


def first_cause(error: BaseException) -> BaseException:
    """The first single exception inside (nested) groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def require_model(model: str) -> None:
    """Raises ConfigError where `model` looks like a folder and is none."""
    folder = os.path.isabs(model) or model.startswith((".", "models/"))
    if folder and not os.path.isfile(os.path.join(model, "config.json")):
        raise ConfigError(
            [
                (
                    "model",
                    f"{model} holds no checkpoint (no config.json). Make it first: "
                    "python -m apps.sft.main --config configs/sft_tiny_cpu.yaml, or "
                    "forge-ptq convert-smollm2",
                )
            ]
        )


def keep_third_parties_quiet(run_dir: RunDir) -> None:
    """Sends the logs of this process and its children to files in the run's folder."""
    os.environ["FORGE_PTQ_LOG_DIR"] = str(run_dir.logs)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.basicConfig(
        filename=run_dir.logs / "client.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
