# make quickstart   train a tiny model on this machine's CPU, from nothing
# make test         all tests (those that need a GPU skip without one)
# make lint         ruff, mypy, and hadolint for the Dockerfiles
# make docs         docs/config.md, the reference of all keys, from the code
# make venv         only the virtual environment of the three above
# make clean        caches and build files; leaves .venv, runs/ and data/

PYTHON ?= python3.11
VENV ?= .venv
SEED ?= 1
# PPO steps of the quickstart; empty takes what its configuration says.
STEPS ?=
# Anything to add: overrides for quickstart, pytest options for test.
ARGS ?=
# Seconds after which one test counts as hung.
TEST_TIMEOUT ?= 600
# Files of tests that run side by side: what a file's tests share is made once. Many wait for
# something; 0 is for ARGS="-s" and for a debugger.
TEST_WORKERS ?= 2

# The longest first: what is short fills the gaps at the end.
TESTS := $(addprefix tests/,faults slurm engine distributed gpu unit)
BIN := $(VENV)/bin
INSTALL := PYTHON=$(BIN)/python requirements/install.sh

export OMP_NUM_THREADS ?= 1

.PHONY: quickstart test lint docs venv clean

quickstart: $(VENV)/.cpu-installed
	$(BIN)/python tools/make_quickstart.py --output data/quickstart --seed $(SEED)
	$(BIN)/rlhf-megatron train --nproc-per-node 4 --config configs/quickstart_cpu.yaml \
		run.seed=$(SEED) $(if $(STEPS),run.steps=$(STEPS)) $(ARGS)

test: $(VENV)/.dev-installed
	$(BIN)/python -m pytest $(TESTS) -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder \
		--timeout=$(TEST_TIMEOUT) $(ARGS)

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile Dockerfile.cpu

docs: $(VENV)/.cpu-installed
	$(BIN)/python tools/config_reference.py --output docs/config.md

venv: $(VENV)/.dev-installed

# Each stamp is older than its requirements when something has to be installed (again).
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.cpu-installed: requirements/cpu.txt requirements/cpu-nodeps.txt requirements/install.sh \
		setup.py | $(BIN)/python
	$(INSTALL) cpu
	EDITABLE=1 $(INSTALL) self
	touch $@

$(VENV)/.dev-installed: requirements/dev.txt $(VENV)/.cpu-installed
	$(INSTALL) dev
	touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
