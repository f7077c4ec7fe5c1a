# Everything from a fresh machine that has git, make, and Python 3.10 or later with pip:
#
#   make run     make the environment, then run the main job on real data (examples/)
#   make test    make the environment, then pass the tests
#
# Variables:
#
#   TORCH    what pip is asked for as torch.  The default takes the newest release, on Linux
#            with several gigabytes of CUDA libraries.  For a CPU build only, name one:
#            `make test TORCH="torch==2.13.0+cpu"`, with whatever options pip needs to find it.
#   PYTHON   the interpreter to make the environment with.
#   VENV     the environment's folder; `make clean` removes it.
#   JOBS     how many tests are run at a time (test, core, faults): they wait more than they work.
#   ARGS     more arguments, for pytest (test, core), ruff (lint) or the benchmark (bench).
#
#   make faults     the whole fault matrix, in four minutes on two free cores
#   make soak       mixed load while workers are killed, for MINUTES=10
#   make test-xla   real torch_xla on its CPU client: an environment of 7 GB in XLA_VENV
#   make test-tpu   real torch_tpu, without a TPU: 1 GB more, in TPU_SITE

PYTHON ?= python3
TORCH  ?= torch
VENV   ?= .venv
JOBS   ?= 3
ARGS   ?=

# Tests start hundreds of processes that import the package: compiled once, not in each.
export PYTHONDONTWRITEBYTECODE =

PIP   = $(1)/bin/python -m pip install --quiet --disable-pip-version-check
MAKE_VENV = $(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and \
	"xpool needs Python 3.10 or later; this is %d.%d. Say which: make PYTHON=..." % v[:2])' \
	&& $(PYTHON) -m venv $(1)

# Folder of the environment without torch: one for each Python version.
CORE_VENV = .venv-core/$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

XLA_VENV ?= .venv-xla
TPU_SITE ?= .venv-tpu

.PHONY: help run test faults soak test-xla test-tpu lint core bench docs-states clean

help:
	@sed -n '/^$$/q;s/^# \{0,1\}//p' Makefile
	@echo "More: make lint, core, bench, docs-states, clean"

run: $(VENV)/.run
	$(VENV)/bin/python examples/evaluate.py
	$(VENV)/bin/python examples/preprocess.py
	$(VENV)/bin/python examples/versions.py

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest -n $(JOBS) $(ARGS)

faults: $(VENV)/.test
	XPOOL_TEST_MATRIX=1 XPOOL_TEST_SLOW=1 $(VENV)/bin/python -m pytest -n $(JOBS) tests/faults $(ARGS)

MINUTES ?= 10

soak: $(VENV)/.test
	$(VENV)/bin/python -m bench.soak --minutes $(MINUTES) $(ARGS)

test-xla: $(XLA_VENV)/.xla
	XPOOL_TEST_WAIT=120 XPOOL_TEST_TIMEOUT=240 PJRT_DEVICE=CPU $(XLA_VENV)/bin/python -m pytest -m xla tests/devices $(ARGS)

test-tpu: $(VENV)/.test $(TPU_SITE)/.tpu
	PYTHONPATH=$(TPU_SITE) TORCH_DEVICE_BACKEND_AUTOLOAD=0 XPOOL_TEST_TIMEOUT=240 \
		$(VENV)/bin/python -m pytest -m torch_tpu tests/devices $(ARGS)

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check $(ARGS)
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

# The core's tests, installed from a built wheel, where neither torch nor numpy exists.
core: $(CORE_VENV)/.core
	$(call PIP,$(CORE_VENV)) --no-deps --no-build-isolation --force-reinstall .
	$(CORE_VENV)/bin/python -m pytest -n $(JOBS) -m "not torch" -p no:cacheprovider $(ARGS)

bench: .venv-bench/.bench
	.venv-bench/bin/python -m bench.floor
	.venv-bench/bin/python -m bench.peers $(ARGS)
	.venv-bench/bin/python -m bench.scaling

docs-states: $(VENV)/.run
	$(VENV)/bin/python -m xpool.jobs.states > docs/states.md

clean:
	rm -rf $(VENV) .venv-core .venv-bench $(XLA_VENV) $(TPU_SITE) examples/out

# Environments.  A stamp says what has been installed, so the second time is quick.

$(VENV)/.torch:
	$(call MAKE_VENV,$(VENV))
	$(call PIP,$(VENV)) $(TORCH)
	touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	$(call PIP,$(VENV)) --editable ".[examples]"
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(call PIP,$(VENV)) --editable ".[test,notebook]"
	touch $@

$(VENV)/.lint: $(VENV)/.run
	$(call PIP,$(VENV)) --editable ".[lint,test]"
	touch $@

$(CORE_VENV)/.core: pyproject.toml
	$(call MAKE_VENV,$(CORE_VENV))
	$(call PIP,$(CORE_VENV)) dill pytest pytest-xdist hypothesis hatchling
	touch $@

# torch_xla is for the torch of its own number, and has no build for a torch without CUDA.
$(XLA_VENV)/.xla:
	$(call MAKE_VENV,$(XLA_VENV))
	$(call PIP,$(XLA_VENV)) torch==2.9.0 torch_xla==2.9.0 numpy dill pytest hypothesis
	touch $@

# Not into the environment: where torch finds torch_tpu, it imports it.
$(TPU_SITE)/.tpu: $(VENV)/.torch
	$(call PIP,$(VENV)) --target $(TPU_SITE) --no-deps torch_tpu==0.2.0 libtpu==0.0.51 \
		absl-py immutabledict frozendict portpicker pyzmq
	touch $@

.venv-bench/.bench: bench/requirements.txt pyproject.toml
	$(call MAKE_VENV,.venv-bench)
	$(call PIP,.venv-bench) $(TORCH)
	$(call PIP,.venv-bench) --requirement bench/requirements.txt --editable .
	touch $@
