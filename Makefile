# VENV=path shares one environment between clones: torch and its CUDA libraries take 6 GB.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.installed
# The clone at hand comes before whichever clone the environment was last installed from.
export PYTHONPATH := $(CURDIR)

.PHONY: demo test lint clean

demo: $(READY)
	$(BIN)/python recipes/demo.py -o demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(TESTS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv demo build dist

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $(READY)
