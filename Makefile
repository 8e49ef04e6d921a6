# Everything here sets itself up: a fresh machine needs Python >= 3.11, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q install -c constraints.txt
ARGS ?= -m "not slow"

.PHONY: demo test lint format bench clean

demo: $(VENV)/.base
	$(BIN)/autosym demo

test: $(VENV)/.tests
	$(BIN)/python -m pytest -q $(ARGS)

bench: $(VENV)/.tests
	$(BIN)/python benchmarks/curvature.py

lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e ".[all]"
	touch $@

$(VENV)/.tests: $(VENV)/.base requirements-oracles.txt
	$(PIP) -e ".[all,test]"
	$(PIP) --no-deps -r requirements-oracles.txt
	touch $@

$(VENV)/.lint: $(VENV)/.base
	$(PIP) -e ".[lint]"
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info
