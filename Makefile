# Everything here sets itself up: a fresh machine needs Python >= 3.11, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q install -c constraints.txt
ARGS ?= -m "not slow"

.PHONY: demo test lint format bench docs clean

demo: $(VENV)/.base
	$(BIN)/autosym demo --force

# Two processes of one thread each: most tests are too small for threads to help.
test: $(VENV)/.tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal $(ARGS)

bench: $(VENV)/.tests
	$(BIN)/python benchmarks/curvature.py
	$(BIN)/python benchmarks/speed.py

lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell

docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict --quiet
	@echo "Written: site/index.html"

format: $(VENV)/.lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e ".[all]"
	touch $@

$(VENV)/.tests: $(VENV)/.base requirements-oracles.txt requirements-zoo.txt
	$(PIP) -e ".[all,test,docs]"
	$(PIP) --no-deps -r requirements-oracles.txt
	$(PIP) --no-deps --upgrade --target $(VENV)/zoo -r requirements-zoo.txt
	touch $@

$(VENV)/.lint: $(VENV)/.base
	$(PIP) -e ".[lint]"
	touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP) -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist site src/*.egg-info
