# make demo PYTHON_ENV=/path/to/python   uses that Python (with ComfyUI's requirements) and sets nothing up
# COMFYUI_PATH=/path/to/ComfyUI          uses that ComfyUI
# make demo MODEL=flux                   with a tiny Flux instead of a tiny SD1.5
# make bench BENCH_RESULTS=/path/to/folder    writes its results there
# make test TEST_WORKERS=4               spreads the tests over four processes; each may take 4 GB

PYTHON ?= python3

BENCH_RESULTS ?= benchmarks/results

TEST_WORKERS ?= 2
PYTEST_SPREAD = $(ENV_PYTHON) -m pytest --numprocesses $(TEST_WORKERS) --dist loadscope --no-loadscope-reorder \
  --durations 30 --durations-min 5

ifdef PYTHON_ENV
ENV_PYTHON := $(PYTHON_ENV)
else
ENV_PYTHON := $(CURDIR)/.venv/bin/python
endif

# Packages are installed without byte code, which Python writes when it first imports them. Where this forbids it, as
# many containers do, every process compiles ComfyUI and its packages anew: five of a server's eleven seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-quick test-all test-families test-coverage test-torches test-pythons test-oneflow \
  test-fleet lint bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    four images without and with OneDiff Model Speedup, compared, and one after a restart; three minutes"
	@echo "             (CKPT=file for your own checkpoint, MODEL=flux)"
	@echo "make test    linters, unit tests, the tests in a real ComfyUI, the package, and OneFlow in a Python 3.10 of"
	@echo "             its own, if one is found; ends with how long it took; docs/testing.md says what it assures"
	@echo "make test-all   these and the slow ones, every model family, the coverage matrix (each patch with each family"
	@echo "             and engine), planted errors, and the releases of PyTorch and Python that people have"
	@echo "make test-quick, test-families, test-coverage, test-torches, test-pythons, test-oneflow, test-fleet"
	@echo "             each by itself"
	@echo "make bench   every measurement, one file and one table (needs an NVIDIA GPU with 80 GB, and half an hour)"
	@echo "make lint    ruff and mypy"
	@echo "make setup   the environments that all of these use: .venv, and in .cache ComfyUI and that of a fleet"
	@echo "make clean   removes everything that these make"

setup:
ifndef PYTHON_ENV
	@$(PYTHON) -m dev.environment
	@$(PYTHON) -m dev.fleet_environment
endif

demo: setup
	@$(ENV_PYTHON) -m dev.demo

lint: setup
	$(ENV_PYTHON) -m ruff check .
	$(ENV_PYTHON) -m ruff format --check .
	$(ENV_PYTHON) -m mypy
	# The pack is a package that is called like its folder, and mypy takes no hyphens: by a link with another name.
	# Its modules are called otherwise than in the first run, so both keep one cache, and torch is read once.
	@folder=$$(mktemp -d) && ln -s "$(CURDIR)" "$$folder/pack" && cd "$$folder" && \
	  $(ENV_PYTHON) -m mypy --config-file "$(CURDIR)/pyproject.toml" --cache-dir "$(CURDIR)/.mypy_cache" \
	    --no-explicit-package-bases pack/__init__.py pack/nodes; status=$$?; rm -r "$$folder"; exit $$status

# OneFlow's tests run in an environment of their own, and a fleet's mostly wait: so both run beside the others.
test: setup
	@$(ENV_PYTHON) -m dev.side_by_side .cache/test-beside.log "$(MAKE) test-oneflow test-fleet" \
	  "$(MAKE) lint" "$(MAKE) test-quick"

test-quick: setup
	$(PYTEST_SPREAD) -m "not slow" tests/unit tests/faults tests/host tests/browser tests/package

test-fleet: setup
	$(ENV_PYTHON) -m pytest tests/fleet -m "not slow" --durations 10 --durations-min 5

test-all: test
	$(PYTEST_SPREAD) -m slow
	@$(ENV_PYTHON) -m dev.oneflow_environment --test --slow
	$(ENV_PYTHON) -m tools.planted_errors --cpu
	$(MAKE) test-families test-coverage test-torches test-pythons

test-families: setup
	$(ENV_PYTHON) -m pytest tests/families

test-torches: setup
	$(ENV_PYTHON) -m dev.torches

test-pythons: setup
	$(ENV_PYTHON) -m dev.pythons

test-coverage: setup
	$(ENV_PYTHON) -m pytest tests/coverage

test-oneflow: setup
	@$(ENV_PYTHON) -m dev.oneflow_environment --test

bench: setup
	@$(ENV_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { \
	  echo "make bench needs an NVIDIA GPU that PyTorch can use, with 80 GB, and about half an hour;" \
	       "it downloads nothing, the weights are random" >&2; exit 2; }
	$(ENV_PYTHON) -m benchmarks --results "$(BENCH_RESULTS)"

clean:
	rm -rf .venv .cache demo .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
