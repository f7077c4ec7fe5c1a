# Everything from a fresh machine that has git, make, and Python 3.10 or later with pip:
#
#   make run        make the environment, then run the main job on real data (examples/)
#   make test       make the environment, then pass the tests: five to ten minutes on two cores
#
# For those who change it (CONTRIBUTING.md):
#
#   make check      ruff, mypy, and the tests that start no process: about a minute
#   make test-all   all tests there are: make test, make rest, make cores, Ray, real torch_xla and torch_tpu
#   make rest       the exhaustive tests, which make test leaves out: more kinds, methods and faults
#   make suites     the tests of joblib, loky and CPython over xpool's pools: ten minutes
#   make cores      the core without torch, on every other Python from 3.10 on that is found here
#   make nightly    many seeds, the slow tests, all of tests/conformance on a Ray cluster, mixed load
#                   while workers are killed, the benchmark
#   make coverage   what make test runs of the package, in workers too; with floors
#   make docs       the site, in docs/_build: Sphinx, with what pip needs for it in DOCS_VENV
#   make dist       wheel and sdist, checked
#   make test-ray   pools over the hosts of a Ray cluster, which runs here: RAY_VENV
#   make test-xla   real torch_xla on its CPU client: an environment of 7 GB in XLA_VENV
#   make test-loader  torchdata's tests of its loader over ours: their source in TORCHDATA
#   make test-tpu   real torch_tpu, without a TPU: 1 GB more, in TPU_SITE
#
# Variables:
#
#   TORCH    what pip is asked for as torch.  The default takes the newest release, on Linux
#            with several gigabytes of CUDA libraries.  For a CPU build only, name one:
#            `make test TORCH="torch==2.13.0+cpu"`, with whatever options pip needs to find it.
#   PYTHON   the interpreter to make the environment with; PYTHONS, those of make cores.
#   VENV     the environment's folder; `make clean` removes it.
#   JOBS     how many tests are run at a time: they wait more than they work.
#   ARGS     more arguments, for pytest or the benchmark (bench).

PYTHON ?= python3
TORCH  ?= torch
VENV   ?= .venv
JOBS   ?= 3
ARGS   ?=

# Tests start hundreds of processes that import the package: compiled once, not in each.
export PYTHONDONTWRITEBYTECODE =

# Folders may have spaces in their names: escaped as targets, in quotes as arguments.
nothing :=
space   := $(nothing) $(nothing)
escaped  = $(subst $(space),\ ,$(1))

PIP    = "$(1)/bin/python" -m pip install --quiet --disable-pip-version-check
PYTEST = "$(VENV)/bin/python" -m pytest -n $(JOBS)
MAKE_VENV = "$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and \
	"xpool needs Python 3.10 or later; this is %d.%d. Say which: make PYTHON=..." % v[:2])' \
	&& "$(PYTHON)" -m venv "$(1)"

# Folder of the environment without torch: one for each Python version.
CORE_VENV = .venv-core/$(shell "$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

DIST_VENV = .venv-dist
DOCS_VENV ?= .venv-docs
RAY_VENV ?= .venv-ray
XLA_VENV ?= .venv-xla
TORCHDATA ?= .torchdata
TPU_SITE ?= .venv-tpu

venv     := $(call escaped,$(VENV))
docs_venv := $(call escaped,$(DOCS_VENV))
ray_venv := $(call escaped,$(RAY_VENV))
xla_venv := $(call escaped,$(XLA_VENV))
tpu_site := $(call escaped,$(TPU_SITE))

.PHONY: help run test check rest suites cores test-all nightly coverage test-ray test-xla test-tpu \
	test-loader core bench dist docs clean

help:
	@sed -n '/^$$/q;s/^# \{0,1\}//p' Makefile
	@echo "More: make core, bench, clean"

run: $(venv)/.run
	"$(VENV)/bin/python" examples/tour.py $(ARGS)

test: $(venv)/.test
	$(PYTEST) $(ARGS)

check: $(venv)/.lint
	"$(VENV)/bin/python" -m ruff check
	"$(VENV)/bin/python" -m ruff format --check
	"$(VENV)/bin/python" -m mypy
	"$(VENV)/bin/python" -m codespell_lib
	$(PYTEST) -m pure $(ARGS)

rest: $(venv)/.test
	$(PYTEST) --all -m exhaustive $(ARGS)

# loky's tests are in its source package alone; joblib's are in its wheel.
suites: $(venv)/.test .suites/.loky
	$(call PIP,$(VENV)) --editable ".[joblib]"
	XPOOL_TEST_SLOW=1 XPOOL_TEST_TIMEOUT=1200 XPOOL_LOKY="$(CURDIR)/.suites/loky" \
		$(PYTEST) --all tests/suites tests/cpython $(ARGS)

# What another version may change: syntax, pickling, multiprocessing.  The oldest runs more.
SOME = tests/layout tests/pickle tests/cpython tests/faults/test_alarms.py \
	$(foreach name,exits insides server task_queue tracker,tests/workers/test_$(name).py) \
	tests/conformance/test_apply.py tests/conformance/test_scripts.py \
	tests/differential/test_shapes.py
MORE = tests/conformance tests/hooks tests/engine tests/queue \
	tests/differential/test_generated_scripts.py
PYTHONS ?= $(shell "$(PYTHON)" tests/support/pythons.py)

cores:
	@test -n "$(PYTHONS)" || echo "no other Python from 3.10 on here: the core is not tried without torch"
	tests="$(MORE) $(SOME)"; for python in $(PYTHONS); do \
		$(MAKE) core PYTHON="$$python" ARGS="--all --quiet $$tests" || exit 1; tests="$(SOME)"; done

test-all:
	$(MAKE) test
	$(MAKE) rest
	$(MAKE) cores
	$(MAKE) test-ray
	$(MAKE) test-xla
	$(MAKE) test-tpu

MINUTES ?= 10
FLOOR   ?= 95

nightly: $(venv)/.test
	XPOOL_TEST_DEEP=20 XPOOL_TEST_SLOW=1 XPOOL_TEST_TIMEOUT=3600 \
		$(PYTEST) --all $(ARGS)
	$(MAKE) suites
	$(MAKE) test-ray OVER_HOSTS="--all tests/conformance"
	"$(VENV)/bin/python" -m bench.soak --minutes $(MINUTES)
	$(call PIP,$(RAY_VENV)) $(TORCH)
	"$(RAY_VENV)/bin/python" -m bench.soak_hosts --minutes $(MINUTES)
	$(MAKE) bench ARGS=

# Of all processes.  What has no clock, threads or system calls has no excuse.
coverage: $(venv)/.test
	$(call PIP,$(VENV)) --editable ".[coverage]"
	"$(VENV)/bin/python" -m coverage erase
	"$(VENV)/bin/python" -m coverage run -m pytest -n $(JOBS) $(ARGS)
	"$(VENV)/bin/python" -m coverage combine --quiet
	"$(VENV)/bin/python" -m coverage report
	"$(VENV)/bin/python" -m coverage report --include="xpool/_engine/jobs/*" --fail-under=$(FLOOR)

# One cluster of two hosts for all of them: one test at a time.  XPOOL_TEST_AGAINST=ray has what is
# promised of each kind of pool tried over hosts: these files here, all by make nightly.
OVER_HOSTS ?= $(foreach name,apply map imap callbacks errors priority,tests/conformance/test_$(name).py)

test-ray: $(ray_venv)/.ray
	XPOOL_TEST_AGAINST=ray "$(RAY_VENV)/bin/python" -m pytest -m ray tests/hosts $(OVER_HOSTS) $(ARGS)

# Real torch_xla opens its client once for a process: one test at a time.
test-xla: $(xla_venv)/.xla
	XPOOL_TEST_WAIT=120 XPOOL_TEST_TIMEOUT=240 PJRT_DEVICE=CPU \
		"$(XLA_VENV)/bin/python" -m pytest --all -m xla tests/devices $(ARGS)

test-tpu: $(venv)/.test $(tpu_site)/.tpu
	PYTHONPATH="$(TPU_SITE)" TORCH_DEVICE_BACKEND_AUTOLOAD=0 XPOOL_TEST_TIMEOUT=240 \
		"$(VENV)/bin/python" -m pytest --all -m torch_tpu tests/devices $(ARGS)

# No package has torchdata's tests.  Where their source cannot be had, they are skipped, with a word.
test-loader: $(venv)/.test
	$(call PIP,$(VENV)) parameterized expecttest
	test -d "$(TORCHDATA)" || git clone --quiet --depth 1 --branch v0.11.0 \
		https://github.com/pytorch/data "$(TORCHDATA)" || true
	XPOOL_TORCHDATA="$(TORCHDATA)" XPOOL_TEST_TIMEOUT=3600 \
		"$(VENV)/bin/python" -m pytest --all tests/ecosystem/test_torchdata.py $(ARGS)

# The core's tests, installed from a built wheel, where neither torch nor numpy exists.
core: $(CORE_VENV)/.core
	$(call PIP,$(CORE_VENV)) --no-deps --no-build-isolation --force-reinstall .
	"$(CORE_VENV)/bin/python" -m pytest -n $(JOBS) -m "not torch" -p no:cacheprovider $(ARGS)

bench: .venv-bench/.bench
	.venv-bench/bin/python -m bench.floor
	.venv-bench/bin/python -m bench.peers $(ARGS)
	.venv-bench/bin/python -m bench.scaling

# -W: a name that the site does not find is an error.  The test searches the site, with Node.js.
docs: $(docs_venv)/.docs
	"$(DOCS_VENV)/bin/python" -m sphinx -W --keep-going -b html docs docs/_build
	"$(DOCS_VENV)/bin/python" -m pytest tests/examples/test_search.py

# Wheel and sdist, and what is wrong with them, in dist.
dist: $(DIST_VENV)/.dist
	rm -rf dist
	"$(DIST_VENV)/bin/python" -m build --outdir dist
	"$(DIST_VENV)/bin/python" -m twine check --strict dist/*
	"$(DIST_VENV)/bin/check-wheel-contents" dist/*.whl

clean:
	rm -rf "$(VENV)" .venv-core .venv-bench "$(DIST_VENV)" "$(DOCS_VENV)" "$(RAY_VENV)" "$(XLA_VENV)" \
		"$(TPU_SITE)" "$(TORCHDATA)" examples/out .suites \
		docs/_build

# Environments.  A stamp says what has been installed, so the second time is quick.

$(venv)/.torch:
	$(call MAKE_VENV,$(VENV))
	$(call PIP,$(VENV)) $(TORCH)
	touch "$@"

$(venv)/.run: $(venv)/.torch pyproject.toml
	$(call PIP,$(VENV)) --editable ".[examples]"
	touch "$@"

$(venv)/.test: $(venv)/.run
	$(call PIP,$(VENV)) --editable ".[test,notebook]"
	touch "$@"

$(venv)/.lint: $(venv)/.test
	$(call PIP,$(VENV)) --editable ".[lint]"
	touch "$@"

# Its own environment, with the pages' imports: torch is needed for the reference of the loader.
$(docs_venv)/.docs: pyproject.toml
	$(call MAKE_VENV,$(DOCS_VENV))
	$(call PIP,$(DOCS_VENV)) $(TORCH)
	$(call PIP,$(DOCS_VENV)) --editable ".[docs,joblib,test]"
	touch "$@"

$(DIST_VENV)/.dist:
	$(call MAKE_VENV,$(DIST_VENV))
	$(call PIP,$(DIST_VENV)) build twine check-wheel-contents
	touch "$@"

$(CORE_VENV)/.core: pyproject.toml
	$(call MAKE_VENV,$(CORE_VENV))
	$(call PIP,$(CORE_VENV)) dill pytest pytest-xdist hypothesis hatchling
	touch "$@"

# Without torch: no worker is to wait for its import.
$(ray_venv)/.ray: pyproject.toml
	$(call MAKE_VENV,$(RAY_VENV))
	$(call PIP,$(RAY_VENV)) "ray>=2.40" dill numpy pytest hatchling editables
	$(call PIP,$(RAY_VENV)) --no-deps --no-build-isolation --editable .
	touch "$@"

# torch_xla is for the torch of its own number, and has no build for a torch without CUDA.
$(xla_venv)/.xla:
	$(call MAKE_VENV,$(XLA_VENV))
	$(call PIP,$(XLA_VENV)) torch==2.9.0 torch_xla==2.9.0 numpy dill pytest hypothesis
	touch "$@"

# Not into the environment: where torch finds torch_tpu, it imports it.
$(tpu_site)/.tpu: $(venv)/.torch
	$(call PIP,$(VENV)) --target "$(TPU_SITE)" --no-deps torch_tpu==0.2.0 libtpu==0.0.51 \
		absl-py immutabledict frozendict portpicker pyzmq
	touch "$@"

.suites/.loky: $(venv)/.test
	rm -rf .suites && mkdir .suites
	"$(VENV)/bin/python" -m pip download --quiet --no-deps --no-binary loky --dest .suites loky
	tar --extract --directory=.suites --file="$$(ls .suites/loky-*.tar.gz)"
	mv .suites/loky-*/ .suites/loky
	touch "$@"

.venv-bench/.bench: bench/requirements.txt pyproject.toml
	$(call MAKE_VENV,.venv-bench)
	$(call PIP,.venv-bench) $(TORCH)
	$(call PIP,.venv-bench) --requirement bench/requirements.txt --editable .
	touch "$@"
