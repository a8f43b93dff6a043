# SPDX-License-Identifier: Apache-2.0
# Set-up, demo, tests and packaging; `make` alone lists the targets.

PYTHON ?= python3
# Where the virtual environment is made. VENV=none runs everything with $(PYTHON) as it is and installs nothing.
VENV ?= .venv
TRACE ?= tests/data/small_trace.csv
# More arguments for the command a target runs, such as ARGS='-k decode'.
ARGS ?=

# The CuPy and NVRTC wheels come for CUDA 12 or 13: 13 where the driver says it can, 12 otherwise and without a driver.
# An exported variable may be empty, so it is tested rather than set with ?=.
ifeq ($(strip $(CUDA)),)
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Z ]* Version: *\([0-9]*\).*/\1/p' | awk 'END { print ($$1 >= 13) ? 13 : 12 }')
endif

# NVRTC comes from its wheel; a system toolkit must not change what is compiled or warn about itself.
unexport CUDA_PATH CUDA_HOME

ifeq ($(VENV),none)
RUN := $(PYTHON)
READY :=
CUPYINFER := $(PYTHON) -c 'import sys; from cupyinfer.cli import main; sys.exit(main())'
else
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready-cuda$(CUDA)
CUPYINFER := $(VENV)/bin/cupyinfer
endif

.PHONY: help setup demo test lint format test-gpu test-matrix test-sanitizer wheel clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{ printf "  make %-14s %s\n", $$1, $$2 }'
	@echo
	@echo "  CUDA=12|13 picks the CuPy wheel, PYTHON=... the interpreter, VENV=none uses that interpreter as it is."

setup: $(READY) ## make the virtual environment with everything the other targets need

demo: $(READY) ## replay a small request trace: every step sized exactly, sampled steps checked
	$(CUPYINFER) replay $(TRACE) $(ARGS)

test: lint ## lint, type check and run every test this machine can run
	$(RUN) -m pytest -n auto --maxprocesses=8 --timeout=300 $(ARGS)

lint: $(READY) ## ruff (rules and format) and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(READY) ## rewrite the sources in the project's format, and the README's tree and sizes
	$(RUN) -m ruff check --fix-only .
	$(RUN) -m ruff format .
	$(RUN) -m tests.project.readme

test-gpu: $(READY) ## run the tests that need a CUDA GPU, and fail where there is none
	$(RUN) -m pytest -m gpu --require-gpu $(ARGS)

test-matrix: $(READY) ## run every cell of docs/MATRIX.md on the GPU; interrupted, the next run goes on
	$(RUN) -m tests.matrix.run $(ARGS)

test-sanitizer: $(READY) ## run a few cells under memcheck, racecheck and initcheck of compute-sanitizer
	$(RUN) -m tests.matrix.sanitizer $(ARGS)

wheel: $(READY) ## build the source archive and the wheel into dist/
	$(RUN) -m build --no-isolation $(ARGS)

clean: ## remove builds and caches, but not the virtual environment
	rm -rf build dist .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find cupyinfer tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

ifneq ($(READY),)
$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON) found; install Python 3.11 or later, or run make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $$($(PYTHON) --version) is too old, Python 3.11 or later is needed; run make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "error: $(PYTHON) cannot make virtual environments; install its venv package (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "Setting up $(VENV) with CuPy for CUDA $(CUDA); this downloads a few hundred MB."
	@rm -f $(VENV)/.ready-*
	@$(PYTHON) -m venv $(VENV)
	@# The CuPy wheels of two CUDA versions install the same files, so the other one goes first.
	@$(RUN) -m pip --disable-pip-version-check uninstall --quiet --yes $(if $(filter 13,$(CUDA)),cupy-cuda12x,cupy-cuda13x) 2>/dev/null
	@$(RUN) -m pip --disable-pip-version-check install --quiet --editable '.[cuda$(CUDA),jax,dev]'
	@touch $@
endif
