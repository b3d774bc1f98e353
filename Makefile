# make quickstart   train a tiny model on this machine's CPU, from nothing
# make test         all tests (those that need a GPU skip without one)
# make lint         ruff and mypy
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
TEST_TIMEOUT ?= 300

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install

export OMP_NUM_THREADS ?= 1

.PHONY: quickstart test lint docs venv clean

quickstart: $(VENV)/.cpu-installed
	$(BIN)/python tools/make_quickstart.py --output data/quickstart --seed $(SEED)
	$(BIN)/rlhf-megatron train --nproc-per-node 4 --config configs/quickstart_cpu.yaml \
		run.seed=$(SEED) $(if $(STEPS),run.steps=$(STEPS)) $(ARGS)

test: $(VENV)/.dev-installed
	$(BIN)/python -m pytest tests/unit tests/distributed tests/engine tests/faults tests/gpu \
		--timeout=$(TEST_TIMEOUT) $(ARGS)

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.cpu-installed
	$(BIN)/python tools/config_reference.py --output docs/config.md

venv: $(VENV)/.dev-installed

# Each stamp is older than its requirements when something has to be installed (again).
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.cpu-installed: requirements/cpu.txt requirements/cpu-nodeps.txt setup.py | $(BIN)/python
	$(PIP) --requirement requirements/cpu.txt
	$(PIP) --no-deps --requirement requirements/cpu-nodeps.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/.dev-installed: requirements/dev.txt $(VENV)/.cpu-installed
	$(PIP) --requirement requirements/dev.txt
	touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
