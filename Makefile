# Everything a newcomer needs: `make tune` runs the main job, `make test` the tests. Both set up what they need.
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: tune test test-slow test-gpu lint types check bench setup clean

tune: setup  ## learn a schedule for a small network on scikit-learn's digits
	$(BIN)/longhorizon tune

test: setup  ## the tests, on two cores
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

test-slow: setup  ## also the slow ones
	$(BIN)/python -m pytest -n 2 -m "not gpu"

test-gpu: setup  ## on a machine with CUDA
	$(BIN)/python -m pytest -m gpu

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

check: lint types test

bench: setup  ## the benchmarks that need no GPU; writes benchmarks/results/*.json
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[bench]"
	$(BIN)/python benchmarks/step_cost.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python docs/tables.py

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
