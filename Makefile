# Everything a person runs. Each target does its own set-up; a second `make setup` does nothing.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ridgeline-ready
PYTHONS := python3.11 python3.12 python3

MODEL ?=
PROMPT ?= Once upon a time
ARGS ?=
export MODEL PROMPT

.DEFAULT_GOAL := help
.PHONY: help setup run test test-full test-gpu check mutants simulate-core bench wheel clean

help:
	@echo "make setup          a virtual environment in $(VENV) with everything pinned"
	@echo "make run            answer one prompt: MODEL=folder-or-hub-id PROMPT='...'"
	@echo "                    (without MODEL: a demonstration on random weights, no download)"
	@echo "make test           the tests (a few minutes); ARGS='-k name' to choose"
	@echo "make test-full      the tests with the full amounts"
	@echo "make test-gpu       the tests on a CUDA device, and those that need one"
	@echo "make check          style, types and who imports whom"
	@echo "make mutants        plant bugs in the core and see that the tests find them"
	@echo "make simulate-core  a million checked steps of the scheduler"
	@echo "make bench          speed of MODEL (or of the random demonstration model)"
	@echo "make wheel          build the wheel into dist/"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ]; then \
	  for p in $(PYTHONS); do \
	    if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      echo "$$p -m venv $(VENV)"; exec $$p -m venv $(VENV); \
	    fi; \
	  done; \
	  echo "Ridgeline needs Python 3.11 or newer; none of $(PYTHONS) is." >&2; exit 1; \
	fi
	$(BIN)/python -m pip install -c constraints.txt setuptools torch
	$(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e '.[test]'
	@touch $@

run: setup
	@if [ -n "$$MODEL" ]; then \
	  exec $(BIN)/ridgeline generate "$$MODEL" -p "$$PROMPT" $(ARGS); \
	fi; \
	echo "No MODEL given, so this is the engine at work on RANDOM weights: the tokens mean nothing." >&2; \
	echo "For text: make run MODEL=folder-or-hub-id PROMPT='...'" >&2; \
	exec $(BIN)/ridgeline generate examples/tiny-random --load-format random \
	  --token-ids 1,2,3,5,8,13 --max-tokens 64 --ignore-eos --seed 0 $(ARGS)

test: setup
	@$(BIN)/python -m pytest -m "not slow and not gpu and not multi_gpu" $(ARGS)

test-full: setup
	@$(BIN)/python -m pytest -m "not gpu and not multi_gpu" $(ARGS)

test-gpu: setup
	@RIDGELINE_TEST_DEVICE=cuda $(BIN)/python -m pytest -m "not slow and not multi_gpu" $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/python -m pytest tests/test_architecture.py --durations=0

mutants: setup
	@$(BIN)/python tools/mutants.py $(ARGS)

simulate-core: setup
	@$(BIN)/python tools/simulate_core.py --steps 1000000 $(ARGS)

bench: setup
	@if [ -n "$$MODEL" ]; then exec $(BIN)/ridgeline bench "$$MODEL" $(ARGS); fi; \
	exec $(BIN)/ridgeline bench examples/tiny-random --load-format random $(ARGS)

wheel: setup
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation -w dist .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
