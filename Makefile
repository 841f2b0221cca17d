# Two commands: `make demo` and `make test`. Each makes .venv when it is missing and installs the pinned versions.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint types docs matrix clean

demo: .venv/demo.ready
	$(BIN)/caveat demo

# One thread a process: two test processes with two threads each would only wait for one another.
test: .venv/test.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 -m "not slow"

lint: .venv/test.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/test.ready
	$(BIN)/mypy

docs: .venv/test.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Several versions of Python and torch, minutes for each; builds of torch with CUDA take 6 GB of disk at a time.
matrix:
	$(PYTHON) tests/version_matrix.py

clean:
	rm -rf .venv .matrix build site caveat-demo *.egg-info

.venv/demo.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[cli]'
	touch $@

.venv/test.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[test]'
	touch $@
