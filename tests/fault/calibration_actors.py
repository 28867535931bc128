"""A Quantizer that dies, stops or goes mad on demand, for test_calibration_faults.py.

A fault is a file in a folder that all replicas know: whoever removes it first has it. So exactly
one replica fails, at exactly the point that the fault names, and nothing depends on timing.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from forge_ptq import store_io, store_stats
from forge_ptq.services.quantizer import Quantizer
from forge_ptq.services.workbench import Workbench

FAULTS = ("kill_before_put", "kill_before_mark", "kill_after_put", "stop_before_put", "nan")


class FaultyQuantizer(Quantizer):
    """faults: the folder."""

    def __init__(self, faults: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        folder, rank = Path(faults), int(os.environ["RANK"])

        def mine(fault: str) -> bool:
            try:
                (folder / fault).unlink()
            except FileNotFoundError:
                return False
            (folder / f"{fault}.pid").write_text(str(os.getpid()))
            return True

        put_stats, put, load = store_stats.put_stats, store_io.put, Workbench.load

        async def faulty_put_stats(*args: Any) -> None:
            if mine("kill_before_put"):
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 0 and mine("stop_before_put"):
                os.kill(os.getpid(), signal.SIGSTOP)
            await put_stats(*args)
            if mine("kill_after_put"):
                os.kill(os.getpid(), signal.SIGKILL)

        async def faulty_put(key: str, *args: Any) -> None:
            if key.startswith("ptq_stats.") and "__mark__" in key and mine("kill_before_mark"):
                os.kill(os.getpid(), signal.SIGKILL)
            await put(key, *args)

        async def faulty_load(bench: Workbench, version: int) -> None:
            await load(bench, version)
            if mine("nan"):
                weight = bench.policy.parameters["model.layers.0.self_attn.q_proj.weight"]
                weight[0, 0] = float("nan")

        store_stats.put_stats = faulty_put_stats  # type: ignore[assignment]
        store_io.put = faulty_put  # type: ignore[assignment]
        Workbench.load = faulty_load  # type: ignore[method-assign, assignment]
