# Every target sets up .venv first if it is missing or older than what it is made from: for the demo with the
# package alone, for all others with what the tests need beside it.
PYTHON ?= python3
BIN := .venv/bin

# The kernels of other processors, which round differently. Tests marked `kernels` run under each of them.
AVX2 := MKL_CBWR=AVX2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
SSE41 := MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41
# Two threads in each of two processes: one that waits must not spin while another has work.
TWO := TEST_THREADS=2 OMP_WAIT_POLICY=passive

AXE := .venv/npm/node_modules/axe-core/axe.min.js

.PHONY: setup browser chromium demo screenshot test test-all kernels lint bench docs wheel clean

setup: .venv/.ready-dev

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/.ready-dev: .venv/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# What the tests in a browser need, which are left out where it is missing.
browser: chromium $(AXE)

chromium:
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { \
		echo 'there is no Chromium: apt-get install chromium, as root'; \
		apt-get update && apt-get install --yes --no-install-recommends chromium; }

$(AXE): | .venv/.ready-dev
	@command -v npm || { echo 'there is no npm: apt-get install npm, as root'; \
		apt-get update && apt-get install --yes --no-install-recommends npm; }
	npm install --prefix .venv/npm --no-save --no-audit --no-fund axe-core@4.14.0

demo: .venv/.ready
	$(BIN)/robustmetric demo

# The pictures of the README, from the demo's report.
screenshot: demo setup chromium
	$(BIN)/python -m tests.browser.screenshot runs/demo/report.html docs/images

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

# The tests that protect a user; property tests draw the same examples every time.
test: lint
	$(BIN)/pytest -n 2 -m 'not slow'

# All the rest: tests in processes, in a browser and of the evidence, property tests on new examples, other kernels.
test-all: test kernels
	$(BIN)/mypy
	$(BIN)/pytest -n 2 -m 'slow or hypothesis' --hypothesis-profile explore

# Left out are two tests that start processes with settings of their own.
OWN := --deselect tests/test_squares.py::test_the_same_bits_come_out_of_every_kernel \
	--deselect tests/test_retrieval.py::test_memory_stays_within_the_budget

kernels: setup
	$(AVX2) $(TWO) $(BIN)/pytest -n 2 -m kernels $(OWN)
	$(SSE41) $(BIN)/pytest -n 2 -m kernels $(OWN)

bench: setup
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/retrieval.py
	$(BIN)/python benchmarks/search.py
	$(BIN)/python benchmarks/attacks.py
	$(BIN)/python -m benchmarks.suite
	$(BIN)/python -m benchmarks.planted
	$(BIN)/python benchmarks/digests.py

docs: setup
	$(BIN)/mkdocs build

# Built by the setuptools of .venv, which constraints.txt names, so that nothing is fetched for it. The demo then runs on the
# wheel alone: in an environment with nothing else, from an empty folder, without the paths of this one (-I).
wheel: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	home=$$(mktemp -d) && trap 'rm -rf "$$home"' EXIT && mkdir "$$home/empty" && \
	$(PYTHON) -m venv "$$home/venv" && \
	"$$home/venv/bin/python" -m pip install --quiet --constraint constraints.txt dist/*.whl && \
	cd "$$home/empty" && run="$$home/venv/bin/python -I $$home/venv/bin/robustmetric" && \
	$$run recipes && $$run reproduce table6 --data digits --dry-run && \
	$$run demo --epochs 1 --queries 8

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site src/*.egg-info
