# Every target sets up what it needs. `make PYTHON=/path/to/python3.12 ...` names the Python to make environments with;
# `make test ARGS="-k scan"` hands arguments on to pytest.

# The first Python on the path that is new enough and can make environments. 3.12 first: the pins were made with it.
PYTHON ?= $(shell for python in python3.12 python3.13 python3 python; do \
	$$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 \
	&& echo $$python && break; done)
ARGS ?=
READY := .venv/.ready
READY_LOWEST := .venv-lowest/.ready
PIP_FLAGS := --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup demo test doctest coverage matrix check format lowest bench validate docs clean

help: ## say what the targets do
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

# $(call environment,FOLDER,REQUIREMENTS): make or update an environment with the package in it, editable.
define environment
@if [ -z "$(PYTHON)" ]; then \
	echo "ppleffects needs Python 3.12 or newer (python3 here: $$(python3 --version 2>&1 | head -n 1)). Install one with its venv module, or name it: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3.12"; \
	exit 1; \
fi
@echo "Setting up $(1) with $$($(PYTHON) --version), some minutes the first time ..."
@[ -x $(1)/bin/python ] && $(1)/bin/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(1)
@$(1)/bin/python -m pip install $(PIP_FLAGS) -r $(2)
@$(1)/bin/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
@touch $(1)/.ready
endef

setup: $(READY) ## make .venv, with everything installed

$(READY): requirements.txt pyproject.toml Makefile
	$(call environment,.venv,requirements.txt)

$(READY_LOWEST): requirements-lowest.txt pyproject.toml Makefile
	$(call environment,.venv-lowest,requirements-lowest.txt)

demo: $(READY) ## the main job: a sharded hierarchical regression on flights
	.venv/bin/python examples/flights.py

test: $(READY) ## all tests but the slow statistics
	.venv/bin/python -m pytest $(ARGS)

doctest: $(READY) ## the examples in the docstrings
	.venv/bin/python -m pytest -p tests.conftest --doctest-modules ppleffects $(ARGS)

# What a model means: all tests but those of the samplers, which are slow.
SUITE ?= tests/effects tests/language tests/interpretations tests/transforms tests/property $(wildcard tests/test_*.py)

coverage: $(READY) ## the branches that the tests of each of the four lower layers reach: 95 % at least
	rm -f .coverage
	.venv/bin/python -m pytest $(filter-out tests/property,$(SUITE)) --cov=ppleffects --cov-branch --cov-report= $(ARGS)
	@low=""; for layer in effects language interpretations transforms; do echo "== $$layer"; \
	.venv/bin/python -m coverage report --include="ppleffects/$$layer/*" --fail-under=95 || low="$$low $$layer"; done; \
	[ -z "$$low" ] || { echo "below 95 %:$$low"; exit 1; }

# In each configuration warnings are errors, rank promotion raises, and some tests run in eight threads.
matrix: $(READY) $(READY_LOWEST) ## the suite in every configuration, one after the other; says which failed
	@failed=""; try() { echo "== $$*"; env "$$@" -m pytest $(SUITE) $(ARGS) || failed="$$failed\n  $$*"; }; \
	try JAX_ENABLE_X64=1 .venv/bin/python; \
	try JAX_ENABLE_X64=0 .venv/bin/python; \
	try PPLEFFECTS_TEST_DEVICES=1 .venv/bin/python; \
	try PPLEFFECTS_TEST_DEVICES=8 .venv/bin/python; \
	try JAX_CHECK_TRACER_LEAKS=1 .venv/bin/python; \
	try JAX_ENABLE_X64=1 .venv-lowest/bin/python; \
	[ -z "$$failed" ] || { printf "failed:$$failed\n"; exit 1; }

check: $(READY) ## lint, format and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright

format: $(READY) ## mend what ruff can mend
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

lowest: $(READY_LOWEST) ## the tests on the lowest supported versions
	.venv-lowest/bin/python -m pytest $(ARGS)

bench: $(READY) ## the benchmarks, one script after the other
	@for script in benchmarks/[!_]*.py; do echo "== $$script"; .venv/bin/python $$script || exit 1; done

validate: $(READY) ## statistics against references: slow
	.venv/bin/python -m pytest -m validate $(ARGS)

docs: $(READY) ## the documentation, its code run, in docs/_build/html
	.venv/bin/sphinx-build -W --keep-going -b html docs docs/_build/html

clean: ## remove caches and what was built; environments stay
	rm -rf .cache .coverage htmlcov build dist docs/_build .hypothesis .pytest_cache .ruff_cache
	find ppleffects tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
