"""The same GRPO run under several seeds: does the reward rise by more than chance?

Usage: python -m apps.bench.seeds --config configs/tiny_cpu.yaml --seeds 0 1 2 [key.path=value ...]

One run after the other, each a command of its own; the JSON holds what each summary.json says.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from forge_ptq.observe.summary import SWAPPED, counts, is_number, write_json

KEPT = (
    "run", "status", "seed", "steps", "accepted", "demoted", "refused", "failed",
    "reward_first10", "reward_last10", "tokens", "tokens_per_s", "first_rollout_s", "wall_s",
    "served_versions", "machine", "packages",
)  # fmt: skip


def run(config: str, seed: int, name: str, output_dir: Path, overrides: list[str]) -> Any:
    """One run; its summary. Raises CalledProcessError if the command fails."""
    arguments = [f"seed={seed}", f"run_name={name}", f"output_dir={output_dir}", *overrides]
    command = [sys.executable, "-m", "apps.grpo_ptq.main", "--config", config, *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((output_dir / name / "summary.json").read_text())


def condense(summary: dict[str, Any]) -> dict[str, Any]:
    """What the comparison of seeds needs."""
    rises = [
        p["perplexity_rise"]
        for p in summary["publishes"]
        if p["verdict"] in SWAPPED and is_number(p["perplexity_rise"])
    ]
    refused = [p for p in summary["publishes"] if p.get("refused")]
    return {
        **{key: summary[key] for key in KEPT},
        "reward_gain": summary["reward_last10"] - summary["reward_first10"],
        "highest_accepted_perplexity_rise": max(rises, default=None),
        "refusals": [{k: p[k] for k in ("version", "verdict", "refused_rise")} for p in refused],
    }


def main() -> None:
    """Run all seeds, print a line each, write the JSON."""
    parser = argparse.ArgumentParser(description="The same GRPO run under several seeds")
    parser.add_argument("--config", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("docs/results/demo_seeds.json"))
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"))
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    options = parser.parse_args()
    results = []
    for seed in options.seeds:
        name = f"seed{seed}_{Path(options.config).stem}"
        result = condense(run(options.config, seed, name, options.output_dir, options.overrides))
        results.append(result)
        print(
            f"seed {seed}: reward {result['reward_first10']:.3f} -> {result['reward_last10']:.3f}, "
            f"{counts(result)}, {result['wall_s']:.0f} s",
            flush=True,
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    command = "python -m apps.bench.seeds " + " ".join(sys.argv[1:])
    write_json(options.out, {"command": command, "seeds": results})


if __name__ == "__main__":
    main()
