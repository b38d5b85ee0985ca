# Every target sets up .venv by itself, once. To use an interpreter that has everything already
# (an image, a container), name it: make test PYTHON=python3

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

ifeq ($(origin PYTHON),command line)
READY :=
else
PYTHON := .venv/bin/python
READY := .venv/.ready
endif

# The checkout's folders kernels/ and host/ must not become importable under these names.
export PYTHONSAFEPATH := 1

# One worker a core, or a single one where there is a GPU (tests/conftest.py): tests that use it run
# one after the other, and a test that has to be killed takes its worker with it, not the run.
WORKERS := -n auto --dist worksteal

.PHONY: help demo test lint gpu-test bench clean

help:
	@echo "make demo      one MoE layer in one launch (CPU reference without a Hopper GPU)"
	@echo "make test      lint, CPU tests and compile checks; GPU tests too where there is an sm_90"
	@echo "make lint      ruff and mypy"
	@echo "make gpu-test  the GPU tests only"
	@echo "make bench     all measurements of perf/ (needs an sm_90 GPU)"

demo: $(READY)
	$(PYTHON) -m cute_moe demo

test: lint
	$(PYTHON) -m pytest -rs $(WORKERS) tests

# mypy sees the three folders as the one package that they are installed as.
lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	rm -rf build/typing && mkdir -p build/typing/cute_moe
	ln -s "$$PWD"/cute_moe/* "$$PWD"/host "$$PWD"/kernels build/typing/cute_moe/
	$(PYTHON) -m mypy -p cute_moe

gpu-test: $(READY)
	$(PYTHON) -m pytest -rs $(WORKERS) -m gpu tests

# The scripts of perf/ import each other from their own folder.
bench: export PYTHONSAFEPATH :=
bench: $(READY)
	$(PYTHON) perf/bench.py all

clean:
	rm -rf .venv build dist *.egg-info

# The first interpreter of a supported version; pip then says what else may be missing.
.venv/bin/python:
	@for candidate in python3 python3.13 python3.12 python3.11 python3.10; do \
	  if "$$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' \
	      2>/dev/null; then \
	    echo "setting up .venv with $$candidate"; exec "$$candidate" -m venv .venv; \
	  fi; \
	done; \
	echo "needs Python 3.10 to 3.13 on PATH" >&2; exit 1

.venv/.ready: pyproject.toml | .venv/bin/python
	nvidia-smi -L >/dev/null 2>&1 || .venv/bin/python -m pip install -q torch==2.13.0
	.venv/bin/python -m pip install -q -e ".[dev]"
	touch $@
