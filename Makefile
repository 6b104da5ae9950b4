# Everything runs in .venv, made from this project's own files.
PYTHON ?= python3
BIN := .venv/bin
# One thread a process: pytest runs one process per core.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-gpu slow long conformance lint format clean

demo: .venv/demo.stamp
	OMP_NUM_THREADS=$$(nproc) $(BIN)/python scripts/demo.py

test: .venv/dev.stamp
	$(BIN)/pytest -n auto

test-gpu: .venv/dev.stamp .venv/gpu.stamp
	$(BIN)/pytest -m gpu -rs -s

slow: .venv/dev.stamp
	$(BIN)/pytest -n auto -m slow

long: .venv/dev.stamp
	$(BIN)/pytest -n auto -m long

conformance: .venv/conformance.stamp
	$(BIN)/python tests/conformance/run.py --baselines --markdown build/conformance/table.md \
		$(if $(SOURCE),--source $(SOURCE))

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/%.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[$*]"
	touch $@

clean:
	rm -rf .venv
