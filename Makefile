# make serve | test | lint | format. Everything is installed into .venv; delete that folder to start afresh.
# Two files of tests run at a time; make test ARGS="-n 0 tests/engine" runs some of them in one process.
# Without ARGS what takes five seconds and more a test is left out; make test ARGS="-m long" runs that.
SHELL := /bin/sh
VENV  := .venv
BIN   := $(VENV)/bin
ARGS  ?=

.PHONY: serve test lint format clean
.DEFAULT_GOAL := serve

serve: $(VENV)/.installed
	@$(BIN)/relevo serve $(ARGS)

test: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(or $(ARGS),-m "not long")

lint: $(VENV)/.installed-test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/bandit -q -c pyproject.toml -r app engine kernels

format: $(VENV)/.installed-test
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The stamps are older than pyproject.toml only after it changed: a second call installs nothing.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing Relevo into $(VENV) (the first time takes a few minutes) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	@echo "Installing Relevo with its test tools into $(VENV) (the first time takes a few minutes) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@ $(VENV)/.installed

# The first Python that is new enough and can make environments; macOS brings an old python3 of its own.
$(BIN)/python:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  command -v $$python >/dev/null 2>&1 || continue; \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  $$python -c 'import ensurepip, venv' 2>/dev/null || { no_venv=$$python; continue; }; \
	  echo "Making $(VENV) with $$($$python --version)"; \
	  exec $$python -m venv $(VENV); \
	done; \
	if [ -n "$$no_venv" ]; then \
	  echo "relevo: $$no_venv cannot make virtual environments; on Debian or Ubuntu: sudo apt-get install python3-venv" >&2; \
	else \
	  echo "relevo: Python 3.11 or newer is needed, and none was found; name one with make PYTHON=/path/to/python3" >&2; \
	fi; \
	exit 1
