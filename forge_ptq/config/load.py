"""Reading a configuration: YAML with interpolation, overrides from the command line, dumping."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .block import UNRESOLVED, Block, ConfigError, to_plain
from .build import Problems, from_mapping
from .checks import check
from .schema import RunConfig


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read `path`, apply `key.path=value` overrides, check everything.

    Raises ConfigError with all problems together: unreadable file, failed interpolation, unknown
    key (with the closest valid one), wrong type, value out of range, keys that contradict.
    """
    problems: Problems = []
    data = load_mapping(path, overrides, problems)
    config = from_mapping(RunConfig, data, problems=problems)
    if not problems:
        problems += check(config)
    if problems:
        raise ConfigError(problems, source=str(path))
    return config


def load_mapping(
    path: str | Path, overrides: Iterable[str] = (), problems: Problems | None = None
) -> dict[str, Any]:
    """The resolved YAML as plain dicts. Used for other applications' configurations too.

    Interpolations: `${other.key}`, `${sum:a,b}`, `${oc.env:NAME}`, `${oc.env:NAME,default}`.
    With `problems` given, what cannot be applied or resolved is noted there; without it, and for a
    file that cannot be read, ConfigError is raised.
    """
    source = str(path)
    # torchforge's YAML files use this resolver; registering it again is harmless.
    OmegaConf.register_resolver("sum", lambda *values: sum(values), replace=True)
    try:
        config = OmegaConf.load(source)
    except OSError as error:
        raise ConfigError([("", f"cannot read {source}: {error.strerror}")], source) from error
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError([("", f"not valid YAML in UTF-8: {error}")], source) from error
    if not isinstance(config, DictConfig):
        raise ConfigError([("", "expected a block of keys at the top")], source)
    found: Problems = [] if problems is None else problems
    data = OmegaConf.to_container(config, resolve=False)
    assert isinstance(data, dict)
    for override in overrides:
        _override(data, override, found)
    config = OmegaConf.create(data)
    resolved = _resolve(config, "", found)
    if problems is None and found:
        raise ConfigError(found, source)
    return resolved


def _resolve(node: Any, path: str, problems: Problems) -> Any:
    """Plain values of `node`. What cannot be resolved is noted and becomes UNRESOLVED."""
    if isinstance(node, ListConfig):
        return [_item(node, i, f"{path}[{i}]", problems) for i in range(len(node))]
    if isinstance(node, DictConfig):
        return {k: _item(node, k, f"{path}.{k!s}" if path else str(k), problems) for k in node}
    return node


def _item(node: Any, key: Any, path: str, problems: Problems) -> Any:
    try:
        value = node[key]
    except OmegaConfBaseException as error:
        problems.append((path, f"cannot be resolved: {str(error).splitlines()[0]}"))
        return UNRESOLVED
    return _resolve(value, path, problems)


def split_key(key: str) -> list[str]:
    """`a.b["*.c"]` or `a.b[*.c]` -> [a, b, *.c]: brackets protect dots within a name."""
    parts: list[str] = []
    rest = key
    while rest:
        if rest.startswith("["):
            end = rest.find("]")
            if end < 0:
                raise ValueError("a [ is not closed")
            parts.append(rest[1:end].strip("\"'"))
            rest = rest[end + 1 :].removeprefix(".")
        else:
            stops = [i for i in (rest.find("."), rest.find("[")) if i >= 0]
            end = min(stops, default=len(rest))
            parts.append(rest[:end])
            rest = rest[end:]
            rest = rest.removeprefix(".") if not rest.startswith("[") else rest
    if not parts or not all(parts):
        raise ValueError("a part of the key is empty")
    return parts


def _override(data: dict[Any, Any], override: str, problems: Problems) -> None:
    """Set one value in unresolved data. A block on the way that is absent or null starts empty."""
    key, equals, text = override.partition("=")
    if not equals:
        problems.append((override, "an override looks like key.path=value"))
        return
    try:
        parts = split_key(key)
        parsed = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)
        assert isinstance(parsed, dict)
        node = data
        for part in parts[:-1]:
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
            if not isinstance(node, dict):
                raise ValueError(f"{part} is a value, not a block of keys")
        node[parts[-1]] = parsed["value"] if text else ""
    except (ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        problems.append((key, f"cannot apply the override {override!r}: {error}"))


def to_yaml(config: Block) -> str:
    """The configuration as YAML, keys in the schema's order."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True, width=100)


def save_config(config: Block, path: str | Path) -> Path:
    """Write the resolved configuration whole, or leave the old file as it was."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(to_yaml(config))
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target
