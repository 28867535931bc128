"""From nested dicts to the typed blocks, strictly, collecting every problem on the way."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .block import UNRESOLVED, ConfigError, Range

T = TypeVar("T")
Problems = list[tuple[str, str]]
_FAILED = object()


def from_mapping(cls: type[T], data: Any, *, path: str = "", problems: Problems | None = None) -> T:
    """Build `cls` from a mapping of plain values.

    With `problems` given, everything wrong is appended there and the result is only usable if
    nothing was; without it, ConfigError is raised.
    """
    found: Problems = [] if problems is None else problems
    before = len(found)
    result = _block(cls, data, path, found, cls)
    if problems is None and len(found) > before:
        raise ConfigError(found)
    return result


def closest(name: str, valid: list[str], cutoff: float = 0.6) -> str | None:
    """The valid name most like `name`, or None when nothing is near."""
    match = difflib.get_close_matches(name, valid, n=1, cutoff=cutoff)
    return match[0] if match else None


@cache
def leaf_paths(cls: type) -> tuple[str, ...]:
    """All key paths that a block has, blocks within it included."""
    result: list[str] = []
    for name, hint in get_type_hints(cls).items():
        result.append(name)
        inner = next((t for t in (hint, *get_args(hint)) if is_dataclass(t)), None)
        if isinstance(inner, type):
            result += [f"{name}.{p}" for p in leaf_paths(inner)]
    return tuple(result)


def unknown_key(key: str, path: str, valid: list[str], root: type) -> str | None:
    """The message for a key that its block does not have; None where no key of any block is near.

    A key of another block has to be nearer than those of this one.
    """
    near = closest(key, valid)
    paths = leaf_paths(root)
    other = closest(key, [p.split(".")[-1] for p in paths], cutoff=0.8)
    if other and other not in valid and (not near or _likeness(key, other) > _likeness(key, near)):
        elsewhere = [p for p in paths if p.split(".")[-1] == other]
        return f"unknown key here; did you mean {' or '.join(elsewhere[:3])}?"
    prefix = f"{path}." if path else ""
    return f"unknown key; did you mean {prefix}{near}?" if near else None


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, b, a).ratio()


def _block(cls: type[T], data: Any, path: str, problems: Problems, root: type) -> T:
    if not isinstance(data, Mapping):
        problems.append((path, f"got {_show(data)}, expected a block of keys"))
        return _FAILED  # type: ignore[return-value]
    own: dict[str, Field[Any]] = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    hints = get_type_hints(cls, include_extras=True)
    values: dict[str, Any] = {}
    failed = listed = False
    for key, value in data.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in own:
            message = unknown_key(str(key), path, list(own), root)
            if message is None:
                message = "unknown key" if listed else f"unknown key; valid here: {', '.join(own)}"
                listed = True
            problems.append((where, message))
            failed = True
            continue
        built = _value(hints[key], value, where, problems, root)
        failed |= built is _FAILED
        values[key] = built
    for name, f in own.items():
        if name not in data and f.default is MISSING and f.default_factory is MISSING:
            where = f"{path}.{name}" if path else name
            problems.append((where, f"missing; expected {type_name(hints[name])}"))
            failed = True
    return _FAILED if failed else cls(**values)  # type: ignore[return-value]


def _value(hint: Any, value: Any, path: str, problems: Problems, root: type) -> Any:
    """`value` as the type `hint`, or _FAILED with a problem noted."""
    if value is UNRESOLVED:
        return _FAILED
    if is_dataclass(hint) and isinstance(hint, type):
        return _block(hint, value, path, problems, root)
    if hint is Any:
        return value
    origin = get_origin(hint)
    if origin is Annotated:
        plain, limit = get_args(hint)
        number = _value(plain, value, path, problems, root)
        if number is not _FAILED and isinstance(limit, Range) and not limit.holds(number):
            problems.append((path, f"got {value}, expected {limit.text}"))
            return _FAILED
        return number
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        inner = [t for t in get_args(hint) if t is not type(None)]
        if len(inner) == 1:
            return _value(inner[0], value, path, problems, root)
        blamed: Problems | None = None
        for option in inner:
            attempt: Problems = []
            built = _value(option, value, path, attempt, root)
            if built is not _FAILED:
                return built
            if isinstance(value, list if get_origin(option) is list else str):
                blamed = attempt
        # The option of the value's own shape says which item is wrong, and what is near.
        if blamed is not None:
            problems += blamed
            return _FAILED
    elif origin is Literal:
        options = get_args(hint)
        if any(value == o and type(value) is type(o) for o in options):
            return value
        near = closest(str(value), [str(o) for o in options])
        hint_text = f"; did you mean {near}?" if near else ""
        problems.append((path, f"got {_show(value)}, expected {type_name(hint)}{hint_text}"))
        return _FAILED
    elif origin is dict and isinstance(value, Mapping):
        key_type, value_type = get_args(hint)
        built_dict = {}
        ok = True
        for k, v in value.items():
            if key_type is str and not isinstance(k, str):
                problems.append((path, f"got the key {_show(k)}, expected text as key"))
                ok = False
                continue
            item = _value(value_type, v, f"{path}.{k}", problems, root)
            ok &= item is not _FAILED
            built_dict[k] = item
        return built_dict if ok else _FAILED
    elif origin is list and isinstance(value, list):
        (item_type,) = get_args(hint)
        items = [_value(item_type, v, f"{path}[{i}]", problems, root) for i, v in enumerate(value)]
        return _FAILED if any(i is _FAILED for i in items) else items
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and isinstance(value, hint) and not _bool_for_int(value, hint):
        return value
    problems.append((path, f"got {_show(value)}, expected {type_name(hint)}"))
    return _FAILED


def _bool_for_int(value: Any, hint: type) -> bool:
    return isinstance(value, bool) and hint is not bool


def type_name(hint: Any) -> str:
    """A type as a reader of YAML would say it."""
    if hint is type(None):
        return "null"
    if is_dataclass(hint):
        return "a block of keys"
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(str(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(a) for a in args)
    if origin is Annotated:
        return f"{type_name(args[0])}, {args[1].text}" if isinstance(args[1], Range) else "a value"
    if origin is dict:
        return f"a block of name: {type_name(args[1])}"
    if origin is list:
        return f"a list of {type_name(args[0]).removeprefix('one of ')}"
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
    return names.get(hint, "any value" if hint is Any else getattr(hint, "__name__", str(hint)))


def _show(value: Any) -> str:
    """A value and its type, short."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "a block of keys"
    text = repr(value)
    return (text if len(text) <= 60 else text[:57] + "...") + f" ({type(value).__name__})"
