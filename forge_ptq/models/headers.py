"""What a checkpoint's safetensors files say they hold, read from their headers in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path

INDEX = "model.safetensors.index.json"
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def tensor_shapes(folder: str | Path) -> dict[str, list[int]]:
    """{tensor: shape} over all files of a folder.

    ValueError names the file that is missing or cannot be read, or the tensor that is in two files
    or not of a floating dtype.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(folder)
    _check_index(folder)
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - not a dict
                    found = handle.get_slice(name)
                    if name in shapes:
                        raise ValueError(f"{file}: {name} is in another file too")
                    if found.get_dtype() not in FLOATS:
                        raise ValueError(
                            f"{file}: {name} is {found.get_dtype()}, expected full precision "
                            f"({', '.join(sorted(FLOATS))})"
                        )
                    shapes[name] = list(found.get_shape())
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file}: cannot be read: {error}") from error
    return shapes


def _check_index(folder: Path) -> None:
    """Every file that the index of a split checkpoint names is there."""
    path = folder / INDEX
    if not path.is_file():
        return
    try:
        files = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not an index of a split checkpoint: {error!r}") from error
    for name in sorted(files):
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing, {INDEX} names it")
