# make demo      GRPO on a tiny policy with INT8 rollouts, minutes on two CPU cores
# make test      lint, types and the whole test suite
# make help      all commands

PYTHON ?= python3.11
VENV ?= .venv
RUN = $(VENV)/bin/python
# One process of torch spinning on all cores slows the others down by a multiple.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export PYTHON VENV

.PHONY: help env demo smollm2 bench test lint unit clean distclean
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z0-9]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 12

env: ## make .venv with the tested set; at once when it is there
	@scripts/setup_env.sh

demo: env ## GRPO on the tiny policy; results in outputs/latest
	@$(RUN) -m apps.sft.main --config configs/sft_tiny_cpu.yaml
	@$(RUN) -m apps.grpo_ptq.main --config configs/tiny_cpu.yaml

smollm2: env ## GRPO on SmolLM2-135M; the first run converts the model
	@$(VENV)/bin/forge-ptq convert-smollm2
	@$(RUN) -m apps.grpo_ptq.main --config configs/smollm2_135m_cpu.yaml

bench: env ## tokens per second of INT8 and bf16 on SmolLM2-135M; run it on an idle machine
	@$(VENV)/bin/forge-ptq convert-smollm2
	@$(RUN) -m apps.bench.throughput --model models/smollm2_135m --override '*.down_proj=bf16'

lint: env ## style, format and types
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy forge_ptq apps tests scripts

unit: env ## tests without processes
	@$(RUN) -m pytest tests/unit -q

test: lint ## lint, then unit, integration and fault tests
	@$(RUN) -m pytest tests --durations=10

clean: ## remove caches and build products; keeps .venv, models and outputs
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find forge_ptq apps tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also remove .venv, models and outputs
	rm -rf $(VENV) $(VENV).lock models outputs
