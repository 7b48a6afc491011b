# `make demo` shows a node lost and replaced; `make test` is what CI runs. Both work from a clean clone.

PYTHON ?= python3
# Another torch than that of constraints.txt, as 2.15.0: everything is installed and run in an environment of its own.
TORCH  ?=
VENV   ?= .venv$(if $(TORCH),-torch-$(TORCH))
# What is installed with it. The other packages stay as they are pinned.
CONSTRAINTS := $(if $(TORCH),.cache/constraints-torch-$(TORCH).txt,constraints.txt)
PY     := $(VENV)/bin/python
ETCD   := .cache/etcd

# The tests' threads compete for few cores.
export OMP_NUM_THREADS ?= 1
export SWIFT_NATIVE_DIR ?= $(CURDIR)/.cache/native

.DEFAULT_GOAL := help
.PHONY: help venv etcd hdfs slurm helm kubernetes prometheus chromium native ready demo test test-all test-gpu soak lint bench tables \
    experiments docs image clean

help:
	@echo "make demo    train on three agents, kill one node, compare the result with an undisturbed run; a page shows it"
	@echo "make test    lint, types, import rules, and tests of everything that this does, in about eleven minutes"
	@echo "make test-all  the same with all tests but the long ones (soak) and those that need a GPU, in about an hour"
	@echo "make soak    the long ones, which vary what is lost, and 200 failures in one job, in some hours"
	@echo "make test-gpu  what needs a GPU; TORCH= names a torch that has one"
	@echo "make kubernetes  compile a control plane of Kubernetes, for tests of test-all and soak that are skipped without it"
	@echo "make lint    only lint, types and import rules"
	@echo "make bench   recovery time and failure-free cost beside torchrun"
	@echo "make test TORCH=2.15.0   with that torch, as are test-all, demo and the others, in an environment of its own"
	@echo "make tables  the tables of the SWIFT paper that can be computed; FIGURES=DIR draws its figures there, too"
	@echo "make experiments  figures of the paper that can be run here, small, in about ten minutes; into FIGURES, or experiments/"
	@echo "make docs    the documentation as a site, into site/html"
	@echo "make image   the container image without a daemon (Debian, as root), into .cache/image"
	@echo "make clean   remove what the other targets made"

venv: $(VENV)/.installed

# The stamp holds until what is to be installed changes.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "swift-agent needs Python 3.11 or newer; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --no-compile --constraint $(CONSTRAINTS) --editable '.[etcd,demo,test,strangers,dev,docs]'
	@# pip would do this on one core, and for what nobody imports. What fails is meant for other versions of Python.
	@$(PY) -m compileall -qq -j 0 -x '/tests?/|/transformers/models/' $(VENV)/lib/python3*/site-packages || true
	touch $@

# Only torch's own line differs.
.cache/constraints-torch-%.txt: constraints.txt
	@mkdir -p $(@D)
	sed 's/^torch==.*/torch==$*/' $< >$@

etcd:
	@scripts/fetch_etcd.sh $(ETCD)

# For tests, which say so if there is none.
hdfs: venv
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/fetch_hdfs.sh .cache/hdfs || echo "no HDFS server; its tests are skipped"

# For the tests of a page, which say so if there is none.
chromium:
	@scripts/fetch_chromium.sh .cache/chromium || echo "no Chromium; its tests are skipped"

slurm:
	@scripts/fetch_slurm.sh .cache/slurm || echo "no Slurm; its tests are skipped"

helm: venv
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/fetch_kubernetes.sh .cache/kubernetes || echo "no helm; its tests are skipped"

# Its control plane is compiled: ten minutes on two cores. Tests of jobs in pods are skipped without it.
kubernetes: venv
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/fetch_kubernetes.sh .cache/kubernetes control-plane

prometheus:
	@scripts/fetch_prometheus.sh .cache/prometheus || echo "no Prometheus; its tests are skipped"

# An accelerator, not a need: without a compiler the pure Python path is used.
native: venv
	@$(PY) -m swift_agent.native build || echo "native forwarder not built; the pure Python one is used"

demo: venv etcd
	@mkdir -p .cache
	$(PY) examples/demo.py --html .cache/demo.html

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# What tests need, two things at a time: a compiler and a type checker use one core each.
ready: venv
	@$(MAKE) --no-print-directory --jobs 2 --output-sync native lint etcd hdfs slurm helm prometheus

test: ready
	$(PY) -m pytest --numprocesses 2 -m "not full and not gpu"

test-all: ready chromium
	$(PY) -m pytest --numprocesses 2 -m "not long and not gpu"

test-gpu: venv etcd native
	$(PY) -m pytest -m gpu

soak: venv etcd hdfs native
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" examples/hdfs_client/build_libhdfs.sh .cache/hdfs || echo "no libhdfs; its tests are skipped"
	$(PY) -m pytest -m long

bench: venv etcd
	$(PY) benchmarks/recovery.py
	$(PY) benchmarks/overhead.py
	$(PY) benchmarks/message_log.py
	$(PY) benchmarks/replay.py
	$(PY) benchmarks/scale.py

tables: venv
	$(PY) benchmarks/tables.py $(if $(FIGURES),--figures '$(FIGURES)')

experiments: venv etcd native
	$(PY) benchmarks/experiments.py --figures '$(or $(FIGURES),experiments)'

docs: venv
	$(PY) scripts/docs_site.py site

image:
	scripts/build_image.sh .cache/image

clean:
	rm -rf experiments site $(VENV) .venv-torch-* .cache build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
