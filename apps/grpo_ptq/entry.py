"""From the command line to a run's folder and an exit code, whatever happens in between."""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import IO, Any, NoReturn

from forge_ptq.config import ConfigError, RunConfig, load_config, save_config, to_plain, to_yaml
from forge_ptq.config.assets import check_assets
from forge_ptq.observe.console import ConsoleView, print_summary
from forge_ptq.observe.report import RunReport
from forge_ptq.observe.run_dir import RunDir, create_run_dir

FAILED, BAD_CONFIG, INTERRUPTED = 1, 2, 130
CHECKPOINT_FILES = ("config.json", "tokenizer.json")

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
        if problems := check_assets(cfg):
            raise ConfigError(problems, arguments.config)
        run_dir = create_run_dir(cfg.output_dir, cfg.run_name, arguments.config)
        lock = claim(run_dir)
        # Without its name, so that running the saved file again makes a new run.
        save_config(replace(cfg, run_name=None), run_dir.config)
    except (ConfigError, ValueError, OSError) as error:
        print(f"{arguments.config}: {error}", file=sys.stderr)
        return BAD_CONFIG
    print(to_yaml(cfg))
    keep_third_parties_quiet(run_dir)

    limit = cfg.ptq.guard.max_perplexity_rise if cfg.ptq.enabled else None
    view = ConsoleView(run_dir.name, cfg.trainer.training.steps, limit)
    report = RunReport(run_dir, to_plain(cfg), view, started=started)
    code = supervise(main, cfg, report)
    print_summary(report.summary(), str(run_dir.path))
    if code == FAILED:
        print(f"logs: {run_dir.logs}", file=sys.stderr)
    lock.close()
    checkpoints = run_dir.checkpoint(cfg.trainer.checkpoint.folder)
    if code in (FAILED, INTERRUPTED) and (checkpoints / "LATEST").exists():
        others = [o for o in arguments.overrides if not o.startswith("run_name=")]
        python = os.path.relpath(sys.executable)
        command = [python, "-m", "apps.grpo_ptq.main", "--config", arguments.config]
        command += [*others, f"run_name={run_dir.name}"]
        print(f"resume: {shlex.join(command)}", file=sys.stderr)
    return code


def leave(code: int) -> NoReturn:
    """Ends the command once all it wrote is on disk and its processes have ended.

    Not through the interpreter's own finalization: threads of Monarch's native code live on, and
    one that reaches for the interpreter then aborts the process ("FATAL: exception not rethrown"),
    now and then, after a run that went well.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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


def claim(run_dir: RunDir) -> IO[str]:
    """Locks the run's folder for this process. OSError while another run uses it."""
    handle = (run_dir.path / ".lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        handle.close()
        raise OSError(f"run_name: {run_dir.name} is running; expected another name") from error
    return handle


def quiet_interrupts() -> None:
    """Until the run has its own handling, Ctrl-C and SIGTERM end the command without a traceback:
    nothing has been started or written that would need more."""

    def leave(number: int, frame: object) -> None:
        del number, frame
        print("interrupted before the run began", file=sys.stderr)
        os._exit(INTERRUPTED)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)


def first_cause(error: BaseException) -> BaseException:
    """The first single exception inside (nested) groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def require_model(model: str) -> None:
    """Raises ConfigError where `model` is no checkpoint folder and no ORG/NAME on the hub."""
    hub_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model)
    if hub_name and not model.startswith("models/") and not os.path.isdir(model):
        return
    missing = [f for f in CHECKPOINT_FILES if not os.path.isfile(os.path.join(model, f))]
    if missing:
        raise ConfigError(
            [
                (
                    "model",
                    f"{model} is no checkpoint folder ({missing[0]} is missing). Make it first: "
                    ".venv/bin/python -m apps.sft.main --config configs/sft_tiny_cpu.yaml, or "
                    ".venv/bin/forge-ptq convert-smollm2",
                )
            ]
        )


def keep_third_parties_quiet(run_dir: RunDir) -> None:
    """Sends the logs of this process and its children to files in the run's folder."""
    os.environ["FORGE_PTQ_LOG_DIR"] = str(run_dir.logs)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.raiseExceptions = False  # a full disk must not fill the console with tracebacks
    logging.basicConfig(
        filename=run_dir.logs / "client.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
