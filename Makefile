# Consignee: everything that a checkout can do. `make` lists it.

PYTHON  ?= python3
VENV    ?= .venv
# Test processes at once; each starts servers of its own, so more than the cores does not help.
WORKERS ?= 2
# Options for the command that a target runs: make dev ARGS="--port 9000 --token ci=secret"
ARGS    ?=

# The image is built by whichever of the two is here; podman keeps the health check only in
# Docker's format.
CONTAINER  ?= $(shell command -v podman || command -v docker || echo docker)
BASE_IMAGE ?= docker.io/library/python:3.13-slim-bookworm
IMAGE      ?= consignee

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALL := $(PIP) install --require-hashes --only-binary :all:
# A worker that dies is replaced once: a test that hangs would take one after the other.
PYTEST  := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --max-worker-restart 1

RUN_READY  := $(VENV)/.ready-to-run
TEST_READY := $(VENV)/.ready-to-test
SOURCES    := app migrations tests

# What runs once more on other back ends: all that keeps something and follows the switch. Tests
# that are about one engine name it themselves, and `make test` runs them.
BACKENDS      ?= postgres+s3
# The slowest files come first, so that no process is left alone with them at the end.
BACKEND_TESTS := \
	$(addprefix tests/e2e/test_,workers uhp_tasks uhp_files hooks clients uhp_crash uhp_downloads) \
	$(addprefix tests/store/test_,machine event_machine crashes session_machine events faults sweep \
		content accounts blobs budgets commits files observing responses sessions staging) \
	$(addprefix tests/ahp/test_,events hooks internal uploads) \
	$(addprefix tests/uhp/test_,containers engine files runs sessions tasks upkeep) \
	tests/conformance/test_core tests/test_cli tests/test_commands_events tests/test_main

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help dev test test-backends lint format bench lock image clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

dev: $(RUN_READY) ## run a receiver on this machine, no configuration needed
	@exec $(BIN)/consignee dev $(ARGS)

test: lint ## run every check: lint, types, import layers, tests, coverage
	$(PYTEST) --cov --cov-report=term $(ARGS)

test-backends: $(TEST_READY) ## run what keeps something on PostgreSQL and an S3 server (BACKENDS=)
	TEST_BACKENDS=$(BACKENDS) $(PYTEST) --no-loadscope-reorder \
		$(addsuffix .py,$(BACKEND_TESTS)) $(ARGS)

lint: $(TEST_READY) ## run the checks that need no test: style, types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(TEST_READY) ## put the sources into the project's form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(TEST_READY) ## measure against peers on this machine (needs nginx and wrk)
	$(BIN)/python -m tests.benchmarks $(ARGS)

image: ## build the container image
	BUILDAH_FORMAT=docker $(CONTAINER) build --build-arg BASE_IMAGE=$(BASE_IMAGE) --tag $(IMAGE) .

clean: ## remove the environment and what the tools left behind
	rm -rf $(VENV) .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache \
		.pytest_cache .ruff_cache htmlcov

# --- the environment: built once, renewed when a lock or pyproject.toml changes ----------------

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name it: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)

$(RUN_READY): requirements/runtime.txt requirements/build.txt pyproject.toml | $(BIN)/pip
	@echo "Installing what Consignee needs into $(VENV) (once) …"
	@$(INSTALL) --requirement requirements/runtime.txt --requirement requirements/build.txt
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(TEST_READY): requirements/test.txt $(RUN_READY)
	@echo "Installing what its tests need into $(VENV) (once) …"
	@$(INSTALL) --requirement requirements/test.txt
	@touch $@

# --- the locks: one resolution, for Python 3.11 and newer, wheels only -------------------------

COMPILE := $(BIN)/uv pip compile --quiet --no-config --universal --python-version 3.11 \
	--only-binary :all: --generate-hashes --custom-compile-command "make lock"

lock: $(RUN_READY) ## resolve the dependencies anew (LOCK=--upgrade takes newer ones)
	$(PIP) install --upgrade uv
	$(COMPILE) $(LOCK) --output-file requirements/runtime.txt pyproject.toml
	$(COMPILE) $(LOCK) --output-file requirements/build.txt \
		--constraint requirements/runtime.txt requirements/build.in
	$(COMPILE) $(LOCK) --output-file requirements/test.txt --extra test \
		--constraint requirements/runtime.txt --constraint requirements/build.txt pyproject.toml
