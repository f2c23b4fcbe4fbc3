# The Python that .venv is built with, how often `make slow` repeats each slow test, how many processes `make test` uses (many
# tests wait more than they compute).
PYTHON ?= python3
ROUNDS ?= 20
JOBS ?= 4

# Test processes share what one of them has compiled, also where bytecode is not wanted elsewhere: else each compiles everything.
test slow: export PYTHONDONTWRITEBYTECODE =
PYTEST = $(BIN)/python -m pytest --dist loadfile --max-worker-restart=3 --durations=10 --durations-min=1

BIN := .venv/bin
# Names the interpreter's version and this folder, because a virtual environment fits one of each.
VENV_TAG := $(shell $(PYTHON) -c 'import os, platform, zlib; print(platform.python_version(), format(zlib.crc32(os.getcwdb()), "08x"), sep="-")' 2>/dev/null)
VENV_BUILT := .venv/.built-$(VENV_TAG)
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: setup demo test slow check docs bench help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' Makefile
	@echo "  PYTHON=$(PYTHON) builds .venv; ROUNDS=$(ROUNDS) repeats the slow tests; ARGS=... goes to pytest or the benchmarks"

setup: $(INSTALLED) ## build .venv, or bring it up to date
	@:

demo: setup ## run the demo: tasks, results and a retry on SQLite, then the data pipeline on Spark
	@$(BIN)/python examples/demo.py
	@$(BIN)/python examples/lake_demo.py

test: setup ## run the tests, without the slow ones
	@$(PYTEST) -m "not slow" -n $(JOBS) $(ARGS)

slow: setup ## run the slow tests, ROUNDS times
	@ROUNDS=$(ROUNDS) $(PYTEST) -m slow -n 2 --timeout=3600 $(ARGS)

check: setup ## format, lint, types, import layers, docs
	@echo "ruff format"; $(BIN)/ruff format --check --quiet . || { echo "to repair: $(BIN)/ruff format ." >&2; exit 1; }
	@echo "ruff check"; $(BIN)/ruff check --quiet .
	@echo "pyright"; PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
	@echo "lint-imports"; $(BIN)/lint-imports --no-logo
	@echo "mkdocs build --strict"; NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir .venv/site-check

docs: setup ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html"

bench: setup ## run the benchmarks
	@$(BIN)/python -m benchmarks $(ARGS)

$(VENV_BUILT):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "omniq needs Python 3.11 or newer; name one with make PYTHON=...")'
	@echo "building .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear .venv
	@touch $@

# PIP_CONSTRAINT holds for the build backend too; -c alone does not.
$(INSTALLED): $(VENV_BUILT) pyproject.toml constraints.txt src/omniq/_version.py
	@echo "installing omniq and its tools into .venv (Spark is large: this takes minutes)"
	@PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq -e '.[all,dev]' -c constraints.txt
	@touch $@
