# The everyday loop. Everything is installed into .venv; nothing outside this folder is touched.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
STAMPS := build/stamps
SOURCES := pyproject.toml CMakeLists.txt $(shell find src csrc -type f ! -name '*.pyc')
BUILD_TOOLS := "scikit-build-core>=0.11" "nanobind>=2.7" "numpy>=2.0" ml_dtypes ninja cmake

# Two workers with two threads each on two cores: threads that wait should sleep.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n 2 --dist worksteal

CLI := "typer>=0.15" "rich>=13"
RIVALS := $(CLI) "matplotlib>=3.8" "plotly>=6" torch==2.13.0 jax flax onnxruntime onnx openvino

.PHONY: help build demo test lint unit test-emulated test-gpu-kernels test-gpu-kernels-short \
  gpu-tables test-large test-report numbers verify bench bench-all bench-torch growth ratios report \
  report-picture clean
help:            ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## / \t/' | expand -t 14

build: $(STAMPS)/package  ## compile and install into .venv

demo: build $(STAMPS)/cli  ## forward and backward on a real size, checked and timed; the command
	$(BIN)/python examples/demo.py
	$(BIN)/groupnorm profile bwd --length 16 16 16 32 64 --layout nhwc --activation silu

test: lint unit test-emulated test-gpu-kernels-short  ## everything CI runs

lint: build $(STAMPS)/test-tools  ## ruff and mypy
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy

unit: build $(STAMPS)/test-tools  ## the tests
	$(PYTEST) -m "not large and not browser"

test-emulated: $(STAMPS)/emulated $(STAMPS)/test-tools  ## AVX-512 kernels on any CPU with AVX2
	PYTHONPATH=build/emulated $(PYTEST) -k avx512 \
	  tests/test_cpu.py tests/test_values.py tests/test_activations.py tests/test_reproducibility.py \
	  tests/test_halves.py tests/test_short_rows.py tests/test_narrow_rows.py \
	  tests/test_features.py

# One process interprets the kernels, another compiles them: Triton cannot do both in one. It is
# installed beside .venv, so that everything else is tested without it.
GPU_TESTS = $(PYTEST) tests/gpu
INTERPRETED = GROUPNORM_GPU_TESTS=interpreted GROUPNORM_BACKEND=triton TRITON_INTERPRET=1
COMPILED = GROUPNORM_GPU_TESTS=compiled TRITON_CACHE_DIR=build/triton-cache

test-gpu-kernels-short: build $(STAMPS)/test-tools $(STAMPS)/triton  ## GPU kernels without a GPU
	PYTHONPATH=build/triton $(INTERPRETED) $(GPU_TESTS)
	PYTHONPATH=build/triton $(COMPILED) $(GPU_TESTS)

test-gpu-kernels: build $(STAMPS)/test-tools $(STAMPS)/triton $(STAMPS)/triton-newest  ## all of them
	for version in triton triton-newest; do \
	  PYTHONPATH=build/$$version GROUPNORM_GPU_WIDE=1 $(INTERPRETED) $(GPU_TESTS) && \
	  PYTHONPATH=build/$$version GROUPNORM_GPU_WIDE=1 $(COMPILED) $(GPU_TESTS) || exit 1; \
	done

gpu-tables: build $(STAMPS)/test-tools $(STAMPS)/triton  ## docs/gpu-tables.md: bytes, compiled code
	PYTHONPATH=build/triton TRITON_CACHE_DIR=build/triton-cache \
	  $(BIN)/python -m groupnorm.triton.tables > build/gpu-tables.md
	mv build/gpu-tables.md docs/gpu-tables.md

test-large: build $(STAMPS)/test-tools  ## the largest published cases at full size; needs 20 GB
	$(BIN)/python -m pytest -q -m large

test-report: build $(STAMPS)/test-tools $(STAMPS)/browser  ## the report in a headless Chromium
	$(BIN)/python -m pytest -q -m browser

verify: build $(STAMPS)/rivals  ## every implementation found here, ours and others
	$(BIN)/groupnorm verify --impl all

numbers: build   ## error against the input's mean, and ulp of the half types
	$(BIN)/python -m groupnorm.testing.numbers

bench: build $(STAMPS)/rivals  ## five minutes against the rivals; rows in results/bench.jsonl
	$(BIN)/groupnorm bench --quick --save results/bench.jsonl

bench-all: build $(STAMPS)/rivals  ## every case, dtype, layout and rival; takes hours
	$(BIN)/groupnorm bench --save results/bench-all.jsonl

bench-torch: build $(STAMPS)/rivals $(STAMPS)/test-tools  ## the PyTorch front end beside torch
	$(BIN)/python -m groupnorm.bench.training --memory --models --save results/training.jsonl

growth: build $(STAMPS)/rivals  ## cost over size, to docs/cost-over-size.png; needs 10 GB
	$(BIN)/python -m groupnorm.bench.growth --threads 1 2 --save results/growth.jsonl \
	  --plot docs/cost-over-size.png

ratios: build $(STAMPS)/cli  ## other dtypes, odd sizes and unaligned rows beside their neighbours
	$(BIN)/python -m groupnorm.bench.ratios

report: build $(STAMPS)/rivals  ## groupnorm-report.html: conformance and speed of this machine
	$(BIN)/groupnorm report

report-picture: build $(STAMPS)/rivals $(STAMPS)/browser  ## the README's picture, from the report
	$(BIN)/groupnorm report --out build/report.html
	$(BIN)/python docs/report_picture.py build/report.html docs/speed-against-rivals.png

clean:           ## remove what was built
	rm -rf .venv build dist

.venv/bin/python:
	$(PYTHON) -m venv .venv

$(STAMPS)/build-tools: pyproject.toml | .venv/bin/python
	$(PIP) install $(BUILD_TOOLS)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/package: $(SOURCES) $(STAMPS)/build-tools
	$(PIP) install --no-build-isolation --no-deps -C cmake.define.GROUPNORM_WERROR=ON .
	@touch $@

# In the folder of the real build, whose objects it shares.
$(STAMPS)/emulated: $(STAMPS)/package tests/emulation/immintrin.h
	rm -rf build/emulated
	$(PIP) install --no-build-isolation --no-deps --target build/emulated \
	  -C cmake.define.GROUPNORM_WERROR=ON -C cmake.define.GROUPNORM_EMULATE_AVX512=ON .
	@touch $@

$(STAMPS)/test-tools: pyproject.toml | $(STAMPS)/build-tools
	$(PIP) install "pytest>=8" "pytest-xdist>=3.6" "hypothesis>=6.100" "onnx>=1.17" $(CLI) "plotly>=6" \
	  "ruff==0.17.4" "mypy>=1.14" torch==2.13.0 expecttest "diffusers>=0.35"
	@touch $@

# The version that torch 2.13 is released with.
$(STAMPS)/triton: | $(STAMPS)/build-tools
	$(PIP) install --upgrade --no-deps --target build/triton triton==3.7.1
	@touch $@

$(STAMPS)/triton-newest: | $(STAMPS)/build-tools
	$(PIP) install --upgrade --no-deps --target build/triton-newest triton
	@touch $@

$(STAMPS)/rivals: pyproject.toml | $(STAMPS)/build-tools
	$(PIP) install $(RIVALS)
	@touch $@

$(STAMPS)/cli: pyproject.toml | $(STAMPS)/build-tools
	$(PIP) install $(CLI)
	@touch $@

# Debian's Chromium, driven by Playwright, which need not download one of its own.
$(STAMPS)/browser: pyproject.toml | $(STAMPS)/build-tools
	command -v chromium > /dev/null || (apt-get update -q && apt-get install -y -q chromium)
	$(PIP) install playwright
	@touch $@
