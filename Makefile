# Every target sets up .venv first if it is missing or older than what it is made from.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test lint bench clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/robustmetric demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2

bench: setup
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/retrieval.py
	$(BIN)/python benchmarks/attacks.py

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info
