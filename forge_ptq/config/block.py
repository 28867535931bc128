"""What every configuration block has in common, and the error that collects all problems.

A block is a keyword-only dataclass. It behaves as a read-only mapping too, so that an app can
write `Generator.options(**cfg.services.policy).as_service(**cfg.policy)` exactly as it does with
torchforge's OmegaConf objects. Values met that way are plain containers: actors in other processes
get dicts, lists and scalars, never our classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, get_args

Scheme = Literal["int8_static", "int8_dynamic", "bf16"]
"""How one linear layer serves. Static: one activation scale per tensor, calibrated on rollouts.
Dynamic: one activation scale per token, computed while serving. bf16: not quantized."""

SCHEMES: tuple[str, ...] = get_args(Scheme)


@dataclass(frozen=True)
class Range:
    """A limit on a number: how a reader would say it, and the test."""

    text: str
    holds: Callable[[float], bool]


PositiveInt = Annotated[int, Range("more than 0", lambda v: v > 0)]
NaturalInt = Annotated[int, Range("0 or more", lambda v: v >= 0)]
Positive = Annotated[float, Range("more than 0", lambda v: 0 < v < float("inf"))]
NotNegative = Annotated[float, Range("0 or more", lambda v: 0 <= v < float("inf"))]
Share = Annotated[float, Range("from 0 to 1", lambda v: 0 <= v <= 1)]
PositiveShare = Annotated[float, Range("more than 0, at most 1", lambda v: 0 < v <= 1)]
TrueShare = Annotated[float, Range("more than 0, less than 1", lambda v: 0 < v < 1)]

UNRESOLVED: Any = object()
"""Stands for a value whose interpolation failed, which has been reported already."""


class ConfigError(ValueError):
    """Everything wrong with a configuration, all at once. `problems` holds (key path, message)."""

    def __init__(self, problems: list[tuple[str, str]], source: str = "configuration") -> None:
        self.problems = list(problems)
        self.source = source
        count = f"{len(problems)} problem" + ("s" if len(problems) != 1 else "")
        lines = [f"{source}: {count}"]
        lines += [f"  {path or '(top level)'}: {message}" for path, message in problems]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.problems, self.source))


def to_plain(value: Any) -> Any:
    """Dataclasses become dicts, tuples become lists, all the way down."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {k: to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    return value


@dataclass(kw_only=True)
class Block:
    """Base of all configuration blocks."""

    def to_dict(self) -> dict[str, Any]:
        """The block as plain dicts, lists and scalars."""
        return to_plain(self)

    def keys(self) -> list[str]:
        return [f.name for f in fields(self)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(fields(self))

    def __getitem__(self, key: str) -> Any:
        if key not in self.keys():
            raise KeyError(key)
        return to_plain(getattr(self, key))

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self.keys() else default
