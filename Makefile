# make demo   train VOLO with token labels on real images, from nothing      make test   run the tests
# make test-versions   the tests on every promised Python that is here, on the oldest with the oldest packages (uv)
# make test-newest   the tests with the newest torch, torchvision and timm there are
# make test-all   the tests and the slow ones: test, test-slow and test-faults, which end within half an hour each
# make test-faults   do every fault of docs/reliability.md to it, hundreds of kill -9 among them (stress-ng: as root, from Debian)
# make test-slurm   as root: a Slurm cluster on this machine, and jobs on it (installs Debian's packages of Slurm, says so)
# make test-docker   build the image on a small base (root; installs Debian's buildah and debootstrap)
# make benchmark-gpu   on a GPU: its tests, then training steps of VOLO-D1, D3 and D5 beside timm's, in calls of 10 minutes
# make house   lines of each room, of tests and docs
# make docs   the pages of docs/ as a site: open site/index.html       make docs-serve  serve it, and follow changes
# make lint   ruff, mypy, shellcheck, hadolint, mkdocs                       make clean  remove .venv and the demo's output
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TEST_ARGS ?=
# The files of tests are shared out among a process per core and one more; PARALLEL= runs them one after the other. In
# their order: files of few tests, which whole programs take long for, would come last where one process alone is left.
PARALLEL ?= --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
DEMO_ARGS ?=
# CALLS=volo_d5 is one of them; DEVICE=cpu rehearses them with a small model. No network, and nothing is installed.
CALLS ?= tests volo_d1 volo_d3 volo_d5
DEVICE ?= cuda
OUT ?= output/benchmark-gpu
BENCHMARK_ARGS ?=

# Container images of Python often set this. Without bytecode each of the programs that tests start takes twice as long.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: benchmark-gpu clean demo docs docs-serve house lint test test-all test-docker test-faults test-newest test-slow test-slurm test-versions

# One stamp per set of extras: installing again is skipped until pyproject.toml changes. `dev` has what `test` has. Python
# compiles what is imported; pip would compile everything, which takes a minute.
$(VENV)/.installed-%: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "python3 -m venv failed: install it with 'apt-get install python3-venv'" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --editable ".[$*]"
	@touch $@ $(if $(filter dev,$*),$(VENV)/.installed-test)

demo: $(VENV)/.installed-demo
	PYTHON=$(BIN)/python $(BIN)/python demo/digits.py $(DEMO_ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PARALLEL) $(TEST_ARGS)

test-versions:
	.ci/test-versions $(PARALLEL) $(TEST_ARGS)

# For a job that runs once a week: what upstream has released breaks here first.
test-newest:
	$(PYTHON) -m venv --clear .venv-versions/newest
	.venv-versions/newest/bin/python -m pip install --quiet --upgrade --editable ".[test]" torch torchvision timm
	.venv-versions/newest/bin/python -m pip list | grep -E "^(torch|torchvision|timm) "
	.venv-versions/newest/bin/python -m pytest $(PARALLEL) $(TEST_ARGS)

test-all: test test-slow test-faults

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PARALLEL) -m slow -k "not test_fault" $(TEST_ARGS)

# stress-ng keeps processors, memory and disk busy beside some of the kills; where it can't be installed, that test is skipped.
test-faults: $(VENV)/.installed-test
	@command -v stress-ng >/dev/null || test "$$(id -u)" != 0 || \
	  (set -x; apt-get update -qq && apt-get install --yes -qq --no-install-recommends stress-ng) || true
	$(BIN)/python -m pytest $(PARALLEL) -m "slow or not slow" -k test_fault $(TEST_ARGS)

# The packages first: without root there is no use in an environment.
test-slurm:
	@tests/slurm/packages.sh
	$(MAKE) $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "slurm or hosts" $(TEST_ARGS); code=$$?; tests/slurm/cluster.sh down; exit $$code

test-docker: $(VENV)/.installed-test
	@for tool in buildah debootstrap; do command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	  test -z "$$missing" || (set -x; apt-get update -qq && apt-get install --yes --no-install-recommends $$missing)
	$(BIN)/python -m pytest -m docker tests/docker $(TEST_ARGS)

# Each row is written as soon as it is measured, so that what a call has no time for is all that is lost.
benchmark-gpu:
	@$(PYTHON) -c 'import torch, timm, pytest' || { \
	  echo "make benchmark-gpu: $(PYTHON) lacks torch, timm or pytest: name another with PYTHON=..." >&2; exit 2; }
	@mkdir -p $(OUT)
	@for call in $(CALLS); do $(MAKE) --no-print-directory benchmark-gpu-$$call || code=$$?; done; exit $${code:-0}

XDIST = $(shell $(PYTHON) -c 'import xdist' 2>/dev/null && echo --numprocesses 6)
benchmark-gpu-tests:
	timeout --signal=INT 590 $(PYTHON) -m pytest -m gpu -v -o faulthandler_timeout=120 $(XDIST) \
	  $(shell grep -rlF --include='test_*.py' mark.gpu tests) >$(OUT)/tests.txt 2>&1; \
	  code=$$?; tail -n 30 $(OUT)/tests.txt; exit $$code

STEP = $(PYTHON) benchmark.py step --device $(DEVICE) --output $(OUT)/step.jsonl --model-dtype bfloat16 --channels-last
PEERS = --peer timm subset timm-compile$(if $(filter-out cpu,$(DEVICE)), launched)
# A CUDA graph holds its memory: two of D3 or D5, and timm's beside them, take more than 80 GB.
ifneq ($(DEVICE),cpu)
benchmark-gpu-volo_d3 benchmark-gpu-volo_d5: PEERS = --drop-path-mode subset --peer timm timm-compile launched
endif
benchmark-gpu-volo_d1: IMAGES = 256
benchmark-gpu-volo_d3: IMAGES = 128
benchmark-gpu-volo_d5: IMAGES = 96
benchmark-gpu-volo_%:
ifeq ($(DEVICE),cpu)
	timeout --signal=INT 590 $(STEP) --model volo_d1 --img-size 32 -b 2 --rounds 1 --warm-up 1 --torchcompile aot_eager $(PEERS)
else
	timeout --signal=INT 590 $(STEP) --model volo_$* -b $(IMAGES) --torchcompile $(PEERS) $(BENCHMARK_ARGS)
endif

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	.ci/lint-shell
	$(BIN)/python -m mkdocs build --site-dir $(VENV)/site

house: $(VENV)/.installed-test
	@$(BIN)/python tests/code_stats.py

docs: $(VENV)/.installed-dev
	$(BIN)/python -m mkdocs build

docs-serve: $(VENV)/.installed-dev
	$(BIN)/python -m mkdocs serve

clean:
	rm -rf $(VENV) site .venv-versions demo_output
