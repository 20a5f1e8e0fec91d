# make demo   train VOLO with token labels on real images, from nothing      make test   run the tests
# make test-versions   the tests on every promised Python that is here, on the oldest with the oldest packages (uv)
# make test-newest   the tests with the newest torch, torchvision and timm there are
# make test-wrong-bfloat16   the tests on a processor that computes bfloat16 convolutions wrong, as some with AMX do
# make test-timm   a model of every family of timm through every program: an hour on two cores
# make test-all   the tests and the slow ones: test, test-slow and test-faults, which end within half an hour each
# make test-faults   do every fault of docs/reliability.md to it, hundreds of kill -9 among them (stress-ng: as root, from Debian)
# make test-slurm   as root: a Slurm cluster on this machine, and jobs on it (installs Debian's packages of Slurm, says so)
# make test-docker   build the image on a small base (root; installs Debian's buildah and debootstrap)
# make benchmark-gpu   on a GPU of 80 GB: its tests, training steps, and whole programs from files, in calls of 10 minutes
# make house   lines of each room, of tests and docs
# make docs   docs/ as a site, and as Markdown with llms.txt: open site/index.html    make docs-serve  serve it, and follow changes
# make lint   ruff, mypy, shellcheck, hadolint, mkdocs                       make clean  remove .venv and the demo's output
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TEST_ARGS ?=
# The files of tests are shared out among a process per core and one more; PARALLEL= runs them one after the other. In
# their order: files of few tests, which whole programs take long for, would come last where one process alone is left.
# A process that has crashed is not started again: xdist would give it the test that it has crashed in.
PARALLEL ?= --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
DEMO_ARGS ?=
# CALLS=day asks a GPU first whether all is right; CALLS=volo_d5 is one of the others, and TIMM a checkout of timm, whose
# train.py is timed; DEVICE=cpu rehearses them with small models. No network, and nothing is installed.
CALLS ?= tests steps volo_d5 files
TIMM ?=
DEVICE ?= cuda
OUT ?= output/benchmark-gpu
BENCHMARK_ARGS ?=

# Container images of Python often set this. Without bytecode each of the programs that tests start takes twice as long.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: benchmark-gpu clean demo docs docs-serve house lint test test-all test-docker test-faults test-newest test-slow test-slurm test-timm test-versions test-wrong-bfloat16

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

# The Python processes that tests start are of that processor too.
test-wrong-bfloat16: $(VENV)/.installed-test
	PYTHONPATH=$(CURDIR)/tests/processor $(BIN)/python -m pytest $(PARALLEL) $(TEST_ARGS)

# TEST_ARGS="-k 'cait or levit'" are some modules of timm.
test-timm: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL:loadfile=load) -m timm $(TEST_ARGS)

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

test-slurm: $(VENV)/.installed-test
	@for tool in slurmctld slurmd sbatch munged ip; do PATH=$$PATH:/usr/sbin command -v $$tool >/dev/null || missing=1; done; \
	  test -z "$$missing" || (set -x; apt-get update -qq && \
	  apt-get install --yes --no-install-recommends slurmctld slurmd slurm-client munge iproute2)
	$(BIN)/python -m pytest -m "slurm or hosts" $(TEST_ARGS)

test-docker: $(VENV)/.installed-test
	@for tool in buildah debootstrap; do command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	  test -z "$$missing" || (set -x; apt-get update -qq && apt-get install --yes --no-install-recommends $$missing)
	$(BIN)/python -m pytest -m docker tests/docker $(TEST_ARGS)

# Each row is written as soon as it is measured, so that what a call has no time for is all that is lost.
benchmark-gpu:
	@$(PYTHON) -c 'import torch, timm, pytest' || { \
	  echo "make benchmark-gpu: $(PYTHON) lacks torch, timm or pytest: name another with PYTHON=..." >&2; exit 2; }
	@mkdir -p $(OUT)
	@for call in $(CALLS); do $(MAKE) --no-print-directory -k benchmark-gpu-$$call || code=$$?; done; exit $${code:-0}

benchmark-gpu-day:
	timeout --signal=INT $(if $(ON_CPU),3600,600) $(PYTHON) -m tests.gpu_day --device $(DEVICE) --output $(OUT)

XDIST = $(shell $(PYTHON) -c 'import xdist' 2>/dev/null && echo --numprocesses 6)
benchmark-gpu-tests:
	timeout --signal=INT 590 $(PYTHON) -m pytest -m gpu -v -o faulthandler_timeout=120 $(XDIST) \
	  $(shell grep -rlF --include='test_*.py' mark.gpu tests) >$(OUT)/tests.txt 2>&1; \
	  code=$$?; tail -n 30 $(OUT)/tests.txt; exit $$code

# The first number is the limit in seconds, half as much again as an H100 is expected to take with an empty cache.
ON_CPU = $(filter cpu,$(DEVICE))
D5 = $(if $(ON_CPU),volo_d1,volo_d5) --drop-path-mode subset
TINY = --img-size 32 -b 8 --rounds 1 --warm-up 1 --torchcompile aot_eager
step = timeout --signal=INT $(if $(ON_CPU),590,$(1)) $(PYTHON) benchmark.py step --device $(DEVICE) --output $(OUT)/step.jsonl \
  --model-dtype bfloat16 --channels-last $(if $(ON_CPU),$(TINY),$(2) --torchcompile $(BENCHMARK_ARGS)) --model $(3) \
  --peer $(4) $(if $(ON_CPU),eager,launched)
benchmark-gpu-steps: benchmark-gpu-volo_d1 benchmark-gpu-lvvit_s benchmark-gpu-volo_d5-512
benchmark-gpu-volo_d1:
	$(call step,280,-b 256,volo_d1,timm timm-compile)
benchmark-gpu-lvvit_s:
	$(call step,90,-b 256,lvvit_s,reference)
# A CUDA graph holds its memory: another one of D5, and timm's beside it, take more than 80 GB.
benchmark-gpu-volo_d5-512:
	$(call step,220,--img-size 512 -b 16,$(D5),)
benchmark-gpu-volo_d5:
	$(call step,590,-b 96,$(D5),timm timm-compile)

benchmark-gpu-features:
	timeout --signal=INT 590 $(PYTHON) benchmark.py features --device $(DEVICE) --output $(OUT)/features.jsonl \
	  $(if $(ON_CPU),--model volo_test --img-size 32 -b 2 --images 4 --rounds 1 --teacher test_vit,--model volo_d1 -b 96 --images 960)

# What labels and a teacher are worth to VOLO-D1, on scenes of products (Debian's dataset-fashion-mnist); a further call
# trains the runs that are missing.
benchmark-gpu-scenes:
	timeout --signal=INT $(if $(ON_CPU),1200,590) $(PYTHON) benchmark.py ablation --scenes products --gpu-size --device $(DEVICE) \
	  --directory $(OUT)/ablation --output $(OUT)/ablation.jsonl $(if $(ON_CPU),--images 50 --validation 20 --single 100 \
	  --epochs 1 --seeds 1 --jobs 1 --arms masks features,--epochs 60) $(BENCHMARK_ARGS)

FEW = --images 4 --copies 1 --image-size 60 48 -b 2 --epochs 1 --workers 1
files = timeout --signal=INT $(if $(ON_CPU),590,$(1)) $(PYTHON) benchmark.py run --device $(DEVICE) --output $(OUT)/run.jsonl \
  $(if $(TIMM),--timm $(TIMM)) $(if $(ON_CPU),$(FEW) $(3),--workers 15) --model $(2)
benchmark-gpu-files: benchmark-gpu-files-volo_d1 benchmark-gpu-files-vit_s
benchmark-gpu-files-volo_d1:
	$(call files,390,volo_d1,--img-size 32)
benchmark-gpu-files-vit_s:
	$(call files,200,vit_small_patch16_224)

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
