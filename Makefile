# Every way to run this project. `make demo` and `make test` set up what they need in .venv, once, and again when the
# dependencies change; nothing is installed outside it. PYTHON chooses the interpreter the environment is made from.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := $(wildcard src/fuselm/*/*.cu src/fuselm/*/*.cuh src/fuselm/*/*.h src/fuselm/*/*.cpp src/fuselm/*/*.cc \
  tests/*/*.cpp tests/*/*/*.cpp tests/*/*/*.h)
PART ?=
OPS ?=
REST ?=
LIMIT ?=

.DEFAULT_GOAL := help
.PHONY: help demo test memcheck lint bench gpu-check clean

help: ## Show these verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## Look at this machine, then train a model that tells stories: three to five minutes on two idle cores, no GPU needed
	$(BIN)/fuselm doctor
	@echo "Slow, beside other work? Ctrl-C, and OMP_NUM_THREADS=1 make demo: torch's threads wait by spinning."
	$(BIN)/fuselm train --preset demo --out runs/demo --samples 20 --overwrite

TEST := $(BIN)/python -m pytest -m "not gpu and not slow" --numprocesses auto --maxprocesses 8

EMULATED := $(addprefix tests/,$(addprefix kernels/,test_generic_torch.py test_emulated.py test_adamw.py test_global_norm.py test_distributed.py) \
  test_optim_narrow.py torchlm/test_model.py torchlm/test_step.py)

test: $(STAMP) ## Run every test that needs no GPU, on every core (8 at most), then those of the kernels on a CPU
	$(TEST)
	$(TEST) --emulated -k "not oracle" $(EMULATED)

# The sanitizer must be loaded before all else, and libstdc++ with it; what lives as long as the process is no leak; and
# what it has to say before it ends a process, pytest must let through.
PRELOADED = $(foreach name,libasan.so libstdc++.so,$(shell g++ -print-file-name=$(name)))

memcheck: $(STAMP) ## Run the kernels on a CPU with every read and write of theirs looked at: a quarter of an hour
	LD_PRELOAD="$(PRELOADED)" ASAN_OPTIONS=detect_leaks=0 $(TEST) --capture=sys --emulated -k "not oracle" $(EMULATED)

lint: $(STAMP) ## Check style, types and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@if [ -z "$(NATIVE)" ]; then echo "no native sources to format"; \
	elif [ -x $(BIN)/clang-format ]; then echo "clang-format --dry-run"; $(BIN)/clang-format --dry-run --Werror $(NATIVE); \
	else echo "clang-format is not here: native sources unchecked"; fi

bench: $(STAMP) ## Benchmark the kernels in full on this machine
	$(BIN)/fuselm bench kernels --out runs/bench

# Installs nothing: it runs with the interpreter it is given, since a GPU machine brings its own CUDA build of torch.
gpu-check: ## On a GPU: PART=tests|sanitizer|bench (all in turn when empty), OPS="op op" (all), REST=1 (what lacks), LIMIT=s
	@set -e; for part in $(or $(PART),tests sanitizer bench); do \
	  echo "gpu-check: $$part"; PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m fuselm.bench.record --part $$part --ops="$(OPS)" \
	    $(if $(LIMIT),--seconds $(LIMIT)) $(if $(REST),--rest); done

clean: ## Remove the environment, caches and runs
	rm -rf $(VENV) runs results .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fuselm needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Say PYTHON=python3.12, for one."; exit 1; }
	@echo "setting up $(VENV) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
