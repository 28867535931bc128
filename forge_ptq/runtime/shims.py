"""Modules that torchforge imports and Monarch 0.7 no longer has. Standard library only.

`install` puts them in place before torchforge is imported: in the client by forge_ptq.runtime, in
spawned processes by child.py, which runs this file (see `main`). What still makes sense works;
remote allocation does not exist in this Monarch under that name and says so when it is used.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

_GONE = (
    "torchforge asks for {name}, which Monarch 0.7 dropped: remote hosts need an older Monarch, "
    "or FORGE_PTQ_RUNTIME=own with launcher slurm"
)


class AllocConstraints:
    """Labels that allocated hosts must match."""

    def __init__(self, match_labels: dict[str, str] | None = None) -> None:
        self.match_labels = dict(match_labels or {})


class _Gone:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(_GONE.format(name=type(self).__name__))


class RemoteAllocator(_Gone):
    """Dropped by Monarch."""


class TorchXRemoteAllocInitializer(_Gone):
    """Dropped by Monarch."""


async def setup_env_for_distributed(
    proc_mesh: Any, master_addr: str | None = None, master_port: int | None = None
) -> None:
    """Sets what torch.distributed's env:// needs in every process of the mesh."""
    from forge_ptq.runtime.own.agent import RankEnvironment

    ranks = proc_mesh.spawn("rank_environment", RankEnvironment)
    await ranks.apply.call(master_addr, master_port)


MODULES: dict[str, dict[str, Any]] = {
    "monarch._rust_bindings.monarch_hyperactor.alloc": {"AllocConstraints": AllocConstraints},
    "monarch._src.actor.allocator": {
        "RemoteAllocator": RemoteAllocator,
        "TorchXRemoteAllocInitializer": TorchXRemoteAllocInitializer,
    },
    "monarch.utils": {"setup_env_for_distributed": setup_env_for_distributed},
}


def _missing(name: str) -> bool:
    if name in sys.modules:
        return False
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:  # its parent is a single extension module, not a package
        return True


def install() -> list[str]:
    """Provides those of MODULES that this Monarch lacks; returns their names."""
    provided = [name for name in MODULES if _missing(name)]
    for name in provided:
        module = types.ModuleType(name, "Provided by forge_ptq.runtime.shims.")
        module.__dict__.update(MODULES[name])
        sys.modules[name] = module
    return provided


def main() -> None:
    """Entry of child.py's preload."""
    install()


if __name__ == "__preload__":
    main()
