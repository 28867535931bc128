"""The options as a table, read from the docstring under each field."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from .build import type_name
from .schema import RunConfig


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the docstring right under it, on one line."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
            ):
                docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def rows(cls: Any = RunConfig, path: str = "") -> list[tuple[str, str, str, str]]:
    """(key path, type, default, meaning) of every option that is not itself a block."""
    result: list[tuple[str, str, str, str]] = []
    hints, docs = get_type_hints(cls, include_extras=True), field_docs(cls)
    for f in fields(cls):
        where = f"{path}.{f.name}" if path else f.name
        hint = hints[f.name]
        inner = next((t for t in (hint, *get_args(hint)) if is_dataclass(t)), None)
        if isinstance(inner, type):
            result += rows(inner, where)
        else:
            result.append((where, type_name(hint), _default(f), docs[f.name]))
    return result


def _default(f: Any) -> str:
    if f.default is not MISSING:
        value = f.default
    elif f.default_factory is not MISSING:
        value = f.default_factory()
    else:
        return "required"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def markdown() -> str:
    """docs/configuration.md; `forge-ptq config-table` prints it."""
    lines = [
        "# Configuration",
        "",
        "Written by `forge-ptq config-table` from the docstrings in `forge_ptq/config/`.",
        "",
        "| key | value | default | meaning |",
        "|---|---|---|---|",
    ]
    for path, kind, default, doc in rows():
        cells = (f"`{path}`", kind, f"`{default}`", doc)
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines) + "\n"
