# Every target sets up .venv first if it is missing or older than what it is made from.
PYTHON ?= python3
BIN := .venv/bin

# The tests that compute, and kernels of other processors, which round otherwise.
NUMERIC := tests/attacks tests/defenses tests/models tests/training/test_module.py \
	$(addprefix tests/robustness/test_, checks.py ers.py evaluate.py record.py) \
	$(addprefix tests/test_, destination.py distance.py losses.py perturb.py retrieval.py squares.py triplets.py)
AVX2 := MKL_CBWR=AVX2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
SSE41 := MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41

.PHONY: setup demo test kernels lint bench clean

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
	$(MAKE) kernels

kernels: setup
	TEST_THREADS=2 $(BIN)/pytest -n 1 $(NUMERIC)
	$(AVX2) TEST_THREADS=1 $(BIN)/pytest -n 2 $(NUMERIC)
	$(AVX2) TEST_THREADS=2 $(BIN)/pytest -n 1 $(NUMERIC)
	$(SSE41) TEST_THREADS=1 $(BIN)/pytest -n 2 $(NUMERIC)
	$(SSE41) TEST_THREADS=2 $(BIN)/pytest -n 1 $(NUMERIC)

bench: setup
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/retrieval.py
	$(BIN)/python benchmarks/attacks.py

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info
