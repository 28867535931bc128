"""What the main loop's process imports for quantization must stay light."""

import subprocess
import sys

import pytest

HEAVY = ("vllm", "transformers", "torchao", "torchtitan", "torchstore", "wandb", "safetensors")


@pytest.mark.parametrize(
    "module", ["forge_ptq.services.ptq", "forge_ptq.services.quantizer", "forge_ptq.store"]
)
def test_heavy_libraries_wait_until_they_are_used(module):
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.strip().splitlines()[-1] == "[]"
