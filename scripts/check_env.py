"""Does this environment hold exactly what the lock files pin?

Usage: python scripts/check_env.py requirements/cpu.lock [...]
Prints what is missing or has another version and exits 1 if anything is. No third-party import.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path


def pins(path: str | Path) -> dict[str, str]:
    """Package -> version of a lock file with one `name==version` a line."""
    result: dict[str, str] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        pin = line.partition("#")[0].strip()
        if pin:
            name, equals, version = pin.partition("==")
            if not equals or not version:
                raise ValueError(f"{path}: {line!r} is not name==version")
            result[name.strip()] = version.strip()
    return result


def differences(wanted: dict[str, str]) -> list[str]:
    """One line for every package that is not installed in the version wanted."""
    result = []
    for name, version in wanted.items():
        try:
            have = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            result.append(f"{name}: not installed, expected {version}")
            continue
        if have != version:
            result.append(f"{name}: {have} installed, expected {version}")
    return result


def main(paths: list[str]) -> int:
    problems = [line for path in paths for line in differences(pins(path))]
    for line in problems:
        print(line)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
