"""The folder of one run: outputs/RUN/ with everything that belongs to it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDir:
    """Paths within one run's folder. All are absolute."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def logs(self) -> Path:
        """Output of all processes but the console's, one file per process mesh."""
        return self.path / "logs"

    @property
    def summary(self) -> Path:
        """The numbers of the run."""
        return self.path / "summary.json"

    @property
    def plot(self) -> Path:
        """The picture of the run."""
        return self.path / "summary.png"

    def checkpoint(self, folder: str) -> Path:
        """Folder of the checkpoints: `folder` below the run's, unless it is absolute."""
        return self.path / folder


def create_run_dir(output_dir: str | Path, run_name: str | None, config_path: str | Path) -> RunDir:
    """Makes `output_dir`/NAME with logs/ and points `output_dir`/latest to it.

    Without `run_name` the name is made of the configuration's file name and the time and is new.
    A given name that exists is used again: that is how a run resumes.
    Raises ValueError for a name that is not a plain folder name.
    """
    parent = Path(output_dir).resolve()
    parent.mkdir(parents=True, exist_ok=True)
    if run_name is None:
        path = _new_folder(parent, f"{Path(config_path).stem}_{time.strftime('%Y%m%d-%H%M%S')}")
    else:
        if not run_name or run_name in (".", "..", "latest") or Path(run_name).name != run_name:
            raise ValueError(f"run_name: got {run_name!r}, expected a plain folder name")
        path = parent / run_name
        path.mkdir(exist_ok=True)
    (path / "logs").mkdir(exist_ok=True)
    _point(parent / "latest", path.name)
    return RunDir(path)


def _new_folder(parent: Path, name: str) -> Path:
    """A folder that this call made: two runs started in the same second do not share one."""
    for attempt in range(1, 1000):
        path = parent / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{parent / name}: 999 runs of this name exist")


def _point(link: Path, target: str) -> None:
    """Replaces the symbolic link at once. Where a real file or folder is in the way, it stays."""
    if link.exists() and not link.is_symlink():
        return
    temporary = link.with_name(f".latest.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)
