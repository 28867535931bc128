"""The slurm launcher against Monarch's real SlurmJob; a stand-in scheduler runs jobs right here."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_ptq.runtime.own.death import ProcessId

pytestmark = pytest.mark.timeout(120)

SBATCH = """#!/bin/bash
cat > "$SLURM_ROOT/job.sh"
export SLURM_NODEID=0 MONARCH_SERVICE_PROC_RANK=0
setsid bash "$SLURM_ROOT/job.sh" > "$SLURM_ROOT/job.log" 2>&1 &
echo $! > "$SLURM_ROOT/pid"
echo "Submitted batch job 7"
"""
SQUEUE = """#!/bin/bash
echo '{"jobs": [{"job_state": ["RUNNING"], "job_resources":
  {"nodes": {"allocation": [{"name": "'$(hostname)'"}]}}}]}'
"""
SCANCEL = """#!/bin/bash
echo "$@" > "$SLURM_ROOT/cancelled"
kill -KILL -- -$(cat "$SLURM_ROOT/pid")
"""
SRUN = """#!/bin/bash
exec "$@"
"""
CLIENT = """
import os, sys
from forge_ptq import runtime
from forge_ptq.runtime import (
    ForgeActor, LauncherConfig, ProvisionerConfig, ServiceConfig, endpoint, init_provisioner,
)

class Remote(ForgeActor):
    @endpoint
    async def where(self):
        return os.getpid(), os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]

async def main():
    args = {"python_exe": sys.executable, "monarch_port": int(sys.argv[1]), "log_dir": sys.argv[2]}
    launcher = LauncherConfig(
        launcher="slurm", job_name="test", scheduler_args=args, transport=sys.argv[3]
    )
    await init_provisioner(ProvisionerConfig(launcher))
    actor = await Remote.options(hosts=1, procs=2, mesh_name="far").as_actor()
    for _, (pid, rank, world, master) in (await actor.where.call()).items():
        print("rank", pid, rank, world, master, flush=True)
    return 0

if __name__ == "__main__":
    sys.exit(runtime.run(main()))
"""


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def test_hosts_come_from_a_slurm_job_that_is_cancelled_at_the_end(tmp_path: Path) -> None:
    scripts = {"sbatch": SBATCH, "squeue": SQUEUE, "scancel": SCANCEL, "srun": SRUN}
    for name, text in scripts.items():
        path = tmp_path / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    client = tmp_path / "client.py"
    client.write_text(CLIENT)
    result = subprocess.run(
        [
            sys.executable,
            str(client),
            str(_free_port()),
            str(tmp_path),
            f"tcp://127.0.0.1:{_free_port()}",
        ],
        env={
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_ROOT": str(tmp_path),
            "FORGE_PTQ_RUNTIME": "own",
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    ranks = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("rank")]
    assert [rank[1:] for rank in ranks] == [
        ["0", "2", socket.gethostname()],
        ["1", "2", socket.gethostname()],
    ], result.stderr + (tmp_path / "job.log").read_text()
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "cancelled").read_text() == "7\n"
    assert "#SBATCH --job-name=test_far" in (tmp_path / "job.sh").read_text()
    pids = [ProcessId.of(int(rank[0])) for rank in ranks]
    limit = time.monotonic() + 5
    while any(process.alive() for process in pids) and time.monotonic() < limit:
        time.sleep(0.1)
    assert [process.pid for process in pids if process.alive()] == []
