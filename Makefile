# Two commands for a new user: `make demo`, then `make test`. Everything lands in `.venv`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-input -q
CPU_INDEX := https://download.pytorch.org/whl/cpu

# A driver on this machine, or the GPU that Windows lends to WSL: only then is the CUDA build of PyTorch wanted.
HAS_NVIDIA := $(shell if [ -e /proc/driver/nvidia/version ] || [ -e /dev/nvidiactl ] || [ -e /usr/lib/wsl/lib/libcuda.so.1 ]; then echo yes; fi)

# The upstream engine's released wheels: tests hold our command lines against the parsers in them. Read as zip files,
# never installed; where no index can be reached those tests are skipped and say so.
UPSTREAM := .upstream
UPSTREAM_VERSIONS := 0.1.2 0.1.3 0.2.0 0.2.1

.PHONY: help demo stop-demo upstream test check format slow wheel clean bench-cli bench-native bench-client bench-tuner

help:
	@echo "make demo      serve the bundled demo model and let it complete one prompt"
	@echo "make stop-demo end what make demo started"
	@echo "make test      run the whole test suite (under 12 minutes on 2 cores)"
	@echo "make check     ruff and mypy"
	@echo "make slow      the tests that take minutes"
	@echo "make wheel     build the wheel into dist/"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "error: Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; hint: make demo PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# PyTorch first. Without an NVIDIA driver its own CPU wheel index is asked, shortly and once; where that cannot be
# reached, a version is named instead so that no resolver picks gigabytes of CUDA. Other configured indexes are
# left out of that first question: one of them could answer it with a CUDA build.
$(VENV)/.torch: constraints-cpu.txt | $(BIN)/python
	@echo "installing PyTorch ($(if $(HAS_NVIDIA),CUDA,CPU) build) into $(VENV)"
ifeq ($(HAS_NVIDIA),yes)
	$(PIP) torch
else
	@PIP_CONFIG_FILE=/dev/null PIP_EXTRA_INDEX_URL= PIP_FIND_LINKS= $(PIP) --retries 0 --timeout 5 --index-url $(CPU_INDEX) torch 2>/dev/null \
		|| { echo "PyTorch's CPU index cannot be reached; taking the version in constraints-cpu.txt"; $(PIP) -c constraints-cpu.txt torch; }
endif
	@touch $@

$(VENV)/.package: pyproject.toml $(VENV)/.torch
	@echo "installing ft into $(VENV)"
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.package
	@echo "installing what tests and linters need"
	$(PIP) -e '.[dev]'
	@touch $@

demo: $(VENV)/.package
	@$(BIN)/ft apply recipes/demo.yaml
	@echo
	@$(BIN)/ft ctl --name demo generate --echo --max-tokens 96 --stop $$'\ndef ' $$'def read_lines(path):\n'
	@echo
	@$(BIN)/ft status demo
	@echo
	@echo "chat with it:  $(BIN)/ft chat --name demo"
	@echo "stop it:       $(BIN)/ft stop demo      (or: make stop-demo)"

stop-demo: $(VENV)/.package
	@$(BIN)/ft stop demo

$(UPSTREAM)/freetoken-%.whl: | $(BIN)/python
	@mkdir -p $(UPSTREAM)/$*
	@$(BIN)/python -m pip download --disable-pip-version-check --no-input -q --retries 0 --timeout 20 --no-deps --only-binary=:all: \
		--python-version 3.11 --platform manylinux_2_27_x86_64 -d $(UPSTREAM)/$* freetoken==$* 2>$(UPSTREAM)/$*/pip.log \
		&& mv $(UPSTREAM)/$*/*.whl $@ || echo "freetoken $* could not be fetched ($(UPSTREAM)/$*/pip.log); its parser is not tested"

upstream: $(UPSTREAM_VERSIONS:%=$(UPSTREAM)/freetoken-%.whl)

test: $(VENV)/.dev upstream
	$(BIN)/python -m pytest -m "not slow"

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

wheel: $(VENV)/.dev
	$(PIP) build
	$(BIN)/python -m build --wheel

bench-cli: $(VENV)/.package
	$(BIN)/python benchmarks/cli_start.py

bench-native: $(VENV)/.package
	$(BIN)/python benchmarks/native_engine.py

# The tuner's own code on 50 simulated machines that it was not developed on, against random search, TPE and a GP;
# twenty minutes on 2 cores. Prints the tables of benchmarks/tuner.md.
bench-tuner: $(VENV)/.package
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m benchmarks.tuner --first 3000

bench-client: $(VENV)/.dev
	$(BIN)/python benchmarks/bench_client.py --out benchmarks/bench_client.json

clean:
	rm -rf $(VENV) dist build
