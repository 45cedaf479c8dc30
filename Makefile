# Everything one has to type: make setup | demo | test | check | bench | wheel; `make help` lists the rest.
#   PYTHON=...  the Python (3.11 or newer) the environment is made from; found by itself if not given
#   VENV=...    where the environment lives (given on the command line only; default .venv)
#   XLA_VENV=...  the same for the one with torch_xla (default .venv-xla)
#   JAX_VENV=...  the same for jax, beside what VENV has (default .venv-jax)
#   ECO_VENV=...  the same for the one with libraries that train (default .venv-ecosystem)
#   TORCH=2.15.0  the PyTorch of test-torch, in an environment of its own (.venv-torch-2.15.0)
#   JOBS=...  processes that run the tests (default 3: many of them wait; 0: none beside make's own)
#   ARGS=...    more arguments for demo, test*, bench, such as ARGS="--device cpu", ARGS="-k views", ARGS="--seed 3"

VENV := .venv
XLA_VENV := .venv-xla
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
XLA_STAMP := $(XLA_VENV)/.setup-done
JAX_VENV := .venv-jax
JAX_STAMP := $(JAX_VENV)/.setup-done
LIBTPU := .libtpu
ECO_VENV := .venv-ecosystem
ECO_STAMP := $(ECO_VENV)/.setup-done
TORCH ?=
TORCH_VENV = .venv-torch-$(TORCH)
TORCH_STAMP = $(TORCH_VENV)/.setup-done
# What runs on torch_xla: its own tests, the lazy device's parity with eager, and the digits, on one device and on two.
XLA_TESTS := tests/xla tests/core/programs/test_parity.py tests/core/program/test_random_draws.py \
    tests/core/executors/torch_xla/test_library.py tests/examples/test_mnist_threads.py
# What runs on XLA through JAX.
JAX_TESTS := tests/jax tests/core/programs/test_parity.py
# What finds most mistakes in a minute: the graph, recording, parts of compiling, op by op, verbs; no processes.
QUICK_TESTS := tests/test_imports.py tests/test_documents.py tests/core/graph tests/core/tensor \
    tests/core/program tests/core/record/test_trace.py tests/core/record/test_recorder.py \
    tests/core/record/test_random_state.py tests/core/shapes/test_shape_inference.py \
    tests/core/executors/test_null.py tests/core/executors/test_reference.py tests/core/program/test_salvage.py \
    tests/core/ops/test_special.py tests/core/ops/test_composites.py tests/core/runtime/test_worker.py \
    tests/core/runtime/test_run_policy.py tests/core/runtime/test_probe.py \
    tests/core/runtime/test_program_cache.py tests/core/api/test_closures.py \
    tests/core/programs/test_control_flow.py tests/core/test_errors.py tests/dist/job/test_ranks.py \
    tests/dist/data/test_batch.py tests/launch/test_spec.py
# What runs with another PyTorch: the quick ones, programs, a sample of its operators, compiled programs, processes.
TORCH_TESTS := $(QUICK_TESTS) tests/core/test_native_extension.py tests/core/record/test_fast_path.py \
    tests/core/executors/test_replay.py tests/core/programs/test_parity.py tests/core/programs/test_optimizers.py \
    tests/core/programs/test_functional.py tests/core/programs/test_autograd.py tests/core/api/test_torch_compile.py \
    tests/nets/test_programs.py tests/nets/test_opinfo.py tests/core/executors/inductor/test_compiled_programs.py \
    tests/dist/collectives/test_ops.py tests/dist/train/test_data_parallel.py
PYTHON ?=
ARGS ?=
JOBS ?= 3

# An active conda or virtual environment of the caller must not leak into ours.
unexport VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV PYTHONPATH PYTHONHOME PYTHONUSERBASE
unexport PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV PIP_CONSTRAINT
export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test test-quick test-xla test-programs test-opinfo test-random check bench clean
.PHONY: test-ecosystem test-copies test-storm test-sanitize test-public test-jax test-torch tpu-aot wheel pictures

help:
	@echo "make setup   make the environment in $(VENV) and build the device"
	@echo "make demo    train a CNN on handwritten digits, in two processes"
	@echo "make test    run the tests"
	@echo "make test-quick  run those that find most mistakes in a minute"
	@echo "make test-xla  run the tests of the TPU executor on the CPU (an environment of 8 GB of its own)"
	@echo "make test-jax  run the tests of the executor for XLA through JAX (an environment of its own)"
	@echo "make tpu-aot  compile training steps for a TPU v5e, without one (ARGS=\"gpt --chips 4\")"
	@echo "make test-torch TORCH=2.15.0  run tests with another PyTorch, 2.9 to 2.15 (an environment of 2 GB of its own)"
	@echo "make test-programs  run small programs beside eager, op by op (ARGS=\"--tier compiled\": compiled, an hour)"
	@echo "make test-opinfo  run PyTorch's operators beside eager: op by op, lowered, compiled (over an hour)"
	@echo "make test-random  run 10,000 random programs beside eager (ARGS=\"--seed 3 --count 500\")"
	@echo "make test-copies  run 2,000 compiled programs that copy and write beside eager (ARGS=\"--count 100\")"
	@echo "make test-storm  kill, stop and starve random processes of a job for a minute (ARGS=\"--seconds 60 --seed N\")"
	@echo "make test-sanitize  run tests with the C++ parts under sanitizers (ARGS=\"--kind thread\" for races)"
	@echo "make test-ecosystem  run scripts of transformers, accelerate and Lightning (an environment of its own)"
	@echo "make test-public  compare all of PyTorch's own databases of modules and optimizers with eager"
	@echo "make pictures  make the pictures of docs/report.md again (needs chromium)"
	@echo "make wheel   make a wheel in dist/ with built C++ parts, for this Python and this PyTorch"
	@echo "make check   formatting, lint, types"
	@echo "make bench   measure recording speed, memory, and training beside its peers, many models (hours)"

setup: $(STAMP)

# A candidate counts if it runs, is new enough and can make environments (Debian splits ensurepip off).
define find_python
for python in $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3 python); do \
    if "$$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
    then found="$$python"; break; fi; \
done; \
if [ -z "$$found" ]; then \
    echo "make: no Python that can make the environment." >&2; \
    echo "  got: $(or $(PYTHON),no python3.11 or newer with the modules venv and ensurepip on PATH)" >&2; \
    echo "  Next: install Python 3.11 or newer (Debian: also python3-venv), or PYTHON=/path/to/python" >&2; \
    exit 1; \
fi
endef

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(find_python); \
	echo "environment: $(VENV), made from $$found"; \
	"$$found" -m venv "$(VENV)"
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,tty]'
	$(BIN)/python -m ltc_core.build \
	    || echo "going on without it: see 'Start' in README.md"
	@touch $@

demo: $(STAMP)
	$(BIN)/ltc-launch --nprocs 2 examples/mnist_processes.py --accuracy-over 96 $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-quick: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(QUICK_TESTS) $(ARGS)

# The nets at full size: each prints its seed, and what differs as a program that can be run.
test-programs: $(STAMP)
	$(BIN)/python -m tests.nets.run_programs $(ARGS)

test-opinfo: $(STAMP)
	$(BIN)/python -m tests.nets.opinfo --tier ops $(ARGS)
	$(BIN)/python -m tests.nets.opinfo --tier lowered $(ARGS)
	$(BIN)/python -m tests.nets.opinfo --tier compiled $(ARGS)

test-random: $(STAMP)
	$(BIN)/python -m tests.nets.random_programs $(ARGS)

test-copies: $(STAMP)
	$(BIN)/python -m tests.nets.copies $(ARGS)

# torch_xla 2.9 wants torch 2.9, whose standard build brings CUDA: 7 GB, and 1 GB for pip's cache.
$(XLA_STAMP): setup.cfg pyproject.toml constraints.txt
	@room=$$(df -Pk . | awk 'NR == 2 {print int($$4 / 1048576)}'); \
	if [ "$$room" -lt 8 ]; then \
	    echo "make: no room for the environment with torch_xla." >&2; \
	    echo "  got: $$room GiB free here, 8 wanted" >&2; \
	    echo "  Next: free some, or XLA_VENV=/where/there/is/room" >&2; \
	    exit 1; \
	fi
	@$(find_python); \
	echo "environment: $(XLA_VENV), made from $$found"; \
	"$$found" -m venv "$(XLA_VENV)"
	grep -v '^torch==' constraints.txt > $(XLA_VENV)/constraints.txt
	$(XLA_VENV)/bin/python -m pip install -c $(XLA_VENV)/constraints.txt -e '.[dev,tpu]'
	$(XLA_VENV)/bin/python -m ltc_core.build
	@touch $@

# Random numbers of the host are eager's, which the parity tests compare with.
test-xla: $(XLA_STAMP)
	LTC_DEVICE=xla PJRT_DEVICE=CPU LTC_RANDOM=host \
	    $(XLA_VENV)/bin/python -m pytest $(or $(ARGS),$(XLA_TESTS))

# Makes an environment beside that of `make setup`: PyTorch and this package are those of it, a .pth file names it.
define beside
	$(BIN)/python -m venv "$(1)"
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_paths()['purelib'])" \
	    > "$$($(1)/bin/python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")/base.pth"
endef

$(JAX_STAMP): $(STAMP)
	$(call beside,$(JAX_VENV))
	$(JAX_VENV)/bin/python -m pip install -c constraints.txt -c constraints-jax.txt jax
	@touch $@

test-jax: $(JAX_STAMP)
	LTC_EXECUTOR=jax LTC_RANDOM=host $(JAX_VENV)/bin/python -m pytest $(or $(ARGS),$(JAX_TESTS))

# Compiles training steps for a TPU without one. libtpu is beside the environment: in it JAX would look for chips.
$(LIBTPU)/.setup-done: $(JAX_STAMP)
	$(JAX_VENV)/bin/python -m pip install --no-deps --target "$(LIBTPU)" libtpu
	@touch $@

tpu-aot: $(LIBTPU)/.setup-done
	PYTHONPATH=$(LIBTPU) $(JAX_VENV)/bin/python -m benchmarks.tpu_aot $(ARGS)

# Of most versions pip finds the CUDA build alone. Its libraries are not installed (--no-deps): stand-ins take their
# place. The list of versions is constraints.txt; PIP_CONSTRAINT replaces one of the machine, which may name a torch.
$(TORCH_STAMP): setup.cfg pyproject.toml constraints.txt
	@if [ -z "$(TORCH)" ]; then \
	    echo "make: no PyTorch is named." >&2; \
	    echo "  got: TORCH is empty, expected a version from 2.9 to 2.15" >&2; \
	    echo "  Next: make test-torch TORCH=2.15.0" >&2; \
	    exit 1; \
	fi
	@$(find_python); \
	echo "environment: $(TORCH_VENV), made from $$found"; \
	"$$found" -m venv "$(TORCH_VENV)"
	grep -v '^torch==' constraints.txt > $(TORCH_VENV)/requirements.txt
	export PIP_CONSTRAINT=$(TORCH_VENV)/requirements.txt; \
	$(TORCH_VENV)/bin/python -m pip install -r $(TORCH_VENV)/requirements.txt && \
	$(TORCH_VENV)/bin/python -m pip install --no-deps torch==$(TORCH) && \
	$(TORCH_VENV)/bin/python -m pip install --no-deps --no-build-isolation -e .
	$(TORCH_VENV)/bin/python -m tests.cuda_stand_ins $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m ltc_core.build
	@touch $@

test-torch: $(TORCH_STAMP)
	$(TORCH_VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TORCH_TESTS) $(ARGS)

$(ECO_STAMP): $(STAMP) constraints-ecosystem.txt
	$(call beside,$(ECO_VENV))
	$(ECO_VENV)/bin/python -m pip install -c constraints.txt -r constraints-ecosystem.txt
	@touch $@

test-ecosystem: $(ECO_STAMP)
	$(ECO_VENV)/bin/python -m pytest -n $(JOBS) tests/ecosystem $(ARGS)

test-storm: $(STAMP)
	$(BIN)/python -m tests.faults.storm $(ARGS)

test-sanitize: $(STAMP)
	$(BIN)/python -m tests.sanitizers $(ARGS)

test-public: $(STAMP)
	PUBLIC=all $(BIN)/python -m pytest --timeout=600 tests/public $(ARGS)

wheel: $(STAMP)
	$(BIN)/python -m ltc_core.build --wheel dist

check: $(STAMP)
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

# The pictures of docs/report.md: four runs, and a browser (Debian's package chromium).
pictures: $(STAMP)
	$(BIN)/python -m tests.report.pictures

bench: $(STAMP)
	$(BIN)/python -m benchmarks.record $(ARGS)
	$(BIN)/python -m benchmarks.memory $(ARGS)
	$(BIN)/python -m benchmarks.compiling $(ARGS)
	$(BIN)/python -m benchmarks.distributed $(ARGS)
	$(BIN)/python -m benchmarks.peers $(ARGS)
	$(BIN)/python -m benchmarks.breadth $(ARGS)

clean:
	rm -rf .venv .venv-xla .venv-torch-* build ltc.egg-info .mypy_cache .pytest_cache .ruff_cache
