# Everything a newcomer or CI runs. `make demo` and `make test` need what README.md names: Python from 3.11.3, make, a C
# compiler, libnuma.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules --no-print-directory --warn-undefined-variables
.DEFAULT_GOAL := help
PY := .venv/bin/python
PYTEST_ARGS ?=
# Test processes. Each file stays in one, whose engine its tests share; two engines at once need about 8 GB. In the
# files' own order: by default those with the most tests come first, and the long ones of few tests would be left over.
PYTEST_PROCESSES ?= 2
# Set-up leaves byte-compiling to the first import, which must be allowed to keep its work (see scripts/setup.sh).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test lint docs bench audit lock clean

help: ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | while IFS=$$'\t' read -r name what; do \
	  printf '  make %-7s %s\n' "$$name" "$$what"; done

setup: ## make .venv: locked packages, vLLM, the bundled model (quick when nothing is missing)
	@scripts/setup.sh

demo: setup ## run the whole service on this machine on a small Parquet file
	@$(PY) -m examples.demo

test: lint ## linters and the whole test suite, as in CI (PYTEST_ARGS="-k name" for a part)
	$(PY) -m pytest -n $(PYTEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: setup ## style, types, import arrows, and whether the generated docs are up to date
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) .venv/bin/lint-imports
	$(PY) -m scripts.cli_reference --check

docs: setup ## regenerate docs/cli.md from the commands' own help
	$(PY) -m scripts.cli_reference

bench: setup ## run the benchmarks
	$(PY) -m benchmarks

audit: setup ## ask osv.dev for known vulnerabilities of the locked versions; says so where it cannot be reached
	$(PY) -m scripts.audit

# Not after `setup`, which would put back the very versions that are being moved.
lock: ## record the versions in .venv as requirements/cpu.lock and dev.lock
	$(PY) -m scripts.lock

clean: ## remove caches and build leftovers; .venv stays (remove it by hand)
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
