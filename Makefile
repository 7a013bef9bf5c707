# SPDX-License-Identifier: Apache-2.0
# Needs Python 3.11 or newer and make, nothing else: each target first sets up $(VENV).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
CORE_EXTRAS := vision,coco,cli,lmdb,mongo,arrow,objects,text,progress,tensorboard,prometheus,opentelemetry,ray,dev,docs
EXTRAS := torch,dev-torch,$(CORE_EXTRAS)
BIN := $(VENV)/bin
JOBS ?= 3
STAMP := $(VENV)/.installed
CLIENTS_VENV ?= .venv-clients
CLIENTS_EXTRAS := torch,vision,text,cli,lmdb,arrow,progress,tensorboard,ray,dev,dev-torch,clients
CLIENTS_STAMP := $(CLIENTS_VENV)/.installed
CORE_VENV ?= .venv-core-$(shell "$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
CORE_STAMP := $(CORE_VENV)/.installed
TESTS_THAT_FORK := $(addprefix tests/,contract engine hostile process threads torch transport)
OTHER_TESTS := $(filter-out $(TESTS_THAT_FORK) $(addprefix tests/,__pycache__ clients examples release suites support), \
	$(patsubst %/,%,$(wildcard tests/*/)) $(wildcard tests/test_*.py))
# Else each process that starts, and many tests start some, compiles what it imports.
export PYTHONDONTWRITEBYTECODE :=
# The files whose names begin with _ are what the benchmarks share, programs among them.
BENCHMARKS := $(shell grep -l '^if __name__ == "__main__"' benchmarks/[!_]*.py)

.DEFAULT_GOAL := help
.PHONY: help demo test test-core ray test-clients browser-deps network-deps slow soak upstream suites gpu lint format types contracts docs docs-serve dist bench bench-smoke peers-environments peers clean

help:
	@echo "make demo         train a small network on real images, and compare the loaders"
	@echo "make test         run the tests"
	@echo "make test-core PYTHON=...  what needs no torch, with another Python, in an environment of its own"
	@echo "make ray          run the tests on a Ray cluster of two nodes, which they start"
	@echo "make test-clients run what uses Penstock: Lightning, JAX ... and the examples, in an environment of their own"
	@echo "make browser-deps  Debian's Chromium, in which the tests open reports; without it they skip"
	@echo "make slow         run the tests that take minutes"
	@echo "make soak         ten minutes of killed workers and corrupt samples, with figures"
	@echo "make upstream     run PyTorch's own test_dataloader.py on Penstock's loader"
	@echo "make suites       run other projects' own tests on Penstock's loader (ONLY=skorch: of one); gigabytes, an hour"
	@echo "make gpu          on a machine with a CUDA device: its tests, and what it brings, in minutes"
	@echo "make lint types contracts    what CI checks besides"
	@echo "make dist         build the wheel and the source distribution, install and try them in each Python (.ci/pythons)"
	@echo "make docs         build the site into site/ and test it; open site/index.html (make docs-serve: while you write)"
	@echo "make bench        run the benchmarks (make bench-smoke: at tiny size)"
	@echo "make peers-environments peers   the other loaders: install each, measure all, write docs/benchmarks.md"
	@echo "make format clean"

# How all environments are made: $(call install,FOLDER,EXTRAS)
define install
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Penstock needs Python 3.11 or newer; found: $$("$(PYTHON)" --version 2>&1). Name one: make PYTHON=/path/to/python3.11"; exit 1; }
	"$(PYTHON)" -m venv "$(1)"
	@echo "Installing into $(1): gigabytes, and some minutes in which pip says nothing."
	"$(1)/bin/python" -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[$(2)]"
endef

$(STAMP): pyproject.toml constraints.txt
	$(call install,$(VENV),$(EXTRAS))
	@touch "$@"

# mmengine wants opencv-python, Penstock and albumentations want opencv-python-headless, and pip lets
# both write the folder cv2. Only the latter stays; `pip check` says that mmengine lacks the other.
$(CLIENTS_STAMP): pyproject.toml constraints.txt
	$(call install,$(CLIENTS_VENV),$(CLIENTS_EXTRAS))
	"$(CLIENTS_VENV)/bin/python" -m pip uninstall -q -y opencv-python
	"$(CLIENTS_VENV)/bin/python" -m pip install --disable-pip-version-check -q -c constraints.txt \
		--no-deps --force-reinstall opencv-python-headless
	@touch "$@"

$(CORE_STAMP): pyproject.toml constraints.txt
	$(call install,$(CORE_VENV),$(CORE_EXTRAS))
	@touch "$@"

demo: $(STAMP)
	"$(BIN)/python" examples/digits.py

# Three processes, also on two cores: many tests wait for workers of their own. JOBS=0 runs them in
# one. Those that fork by the hundred run first and by themselves: what the others import, as pandas
# and SciPy, makes a process twice as large, and each fork of it twice as dear. Tests that share a
# fixture are neighbours, and stay together until a process has none left (worksteal).
# $(call run-tests,FOLDER OF THE ENVIRONMENT)
define run-tests
	@status=0; for tests in "$(TESTS_THAT_FORK)" $(if $(OTHER_TESTS),"$(OTHER_TESTS)"); do \
		"$(1)/bin/python" -m pytest -q -m "not slow and not ray and not docs" -n $(JOBS) --dist worksteal $$tests || status=1; \
	done; exit $$status
endef

test: $(STAMP)
	$(call run-tests,$(VENV))

# Modules that import torch count as skipped; any other reason not to be imported is an error. Without
# the other tests (OTHER_TESTS=) it takes minutes less.
test-core: $(CORE_STAMP)
	$(call run-tests,$(CORE_VENV))

# Two clusters side by side: most of the time a test waits for actors to start.
ray: $(STAMP)
	"$(BIN)/python" -m pytest -q -m "ray and not slow" -n $(JOBS) --dist loadfile tests/ray

# Minutes to install, and 6 GB.
test-clients: $(CLIENTS_STAMP)
	PENSTOCK_REQUIRE_CLIENTS=1 "$(CLIENTS_VENV)/bin/python" -m pytest -q -m "clients and not slow" -n $(JOBS) --dist loadfile tests/clients tests/examples

# Needs root. The tests of a broken link make their own hosts, in network namespaces.
network-deps:
	@command -v ip >/dev/null || { apt-get update -q && apt-get install -q -y --no-install-recommends iproute2; }

# Needs root. The driver has to be of the browser's version, so both come from the distribution.
browser-deps:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
		{ apt-get update -q && apt-get install -q -y --no-install-recommends chromium chromium-driver; }

slow: $(STAMP)
	"$(BIN)/python" -m pytest -q -m slow

soak: $(STAMP)
	"$(BIN)/python" tests/process/soak.py 600

# Needs PENSTOCK_TORCH_TEST_DATALOADER, see tests/upstream/README.md.
upstream: $(STAMP)
	"$(BIN)/python" -m pytest -q -m slow tests/upstream

# Needs a package index: each suite has an environment of its own below .suites.
suites: $(STAMP)
	"$(BIN)/python" tests/suites/run.py $(ONLY)

gpu: $(STAMP)
	PENSTOCK_REQUIRE_GPU=1 "$(BIN)/python" -m pytest -q tests/device
	"$(BIN)/python" benchmarks/device/gpu.py --out benchmarks/results

lint: $(STAMP)
	"$(BIN)/ruff" format --check .
	"$(BIN)/ruff" check .

format: $(STAMP)
	"$(BIN)/ruff" check --fix .
	"$(BIN)/ruff" format .

types: $(STAMP)
	"$(BIN)/mypy" --strict src

contracts: $(STAMP)
	"$(BIN)/lint-imports"
	"$(BIN)/python" tests/contract/size.py

# Both into dist/, which holds nothing else afterwards; then they are installed and tried, by each of
# the interpreters of .ci/pythons. It needs a package index, and takes minutes, most of them in pip:
# hence the longer time limit.
dist: $(STAMP)
	rm -rf dist
	PIP_CONSTRAINT="$(CURDIR)/constraints.txt" "$(BIN)/python" -m build
	"$(BIN)/python" -m twine check --strict dist/*
	@wc -c dist/*
	PENSTOCK_PYTHONS="$$(.ci/pythons)" PENSTOCK_DIST="$(CURDIR)/dist" \
		"$(BIN)/python" -m pytest -q tests/release -o faulthandler_timeout=600 --durations=0 --durations-min=5

# The first variable: Material's makers announce their next project at every start.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build --strict
	PENSTOCK_SITE="$(CURDIR)/site" "$(BIN)/python" -m pytest -q -m docs -n $(JOBS) --dist loadfile tests/docs tests/browser

docs-serve: $(STAMP)
	NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" serve

bench: $(STAMP)
	@set -e; for file in $(BENCHMARKS); do echo "== $$file"; "$(BIN)/python" "$$file"; done
	"$(BIN)/python" benchmarks/dropin/never_slower.py

bench-smoke: $(STAMP)
	@set -e; for file in $(BENCHMARKS); do echo "== $$file --smoke"; "$(BIN)/python" "$$file" --smoke; done
	"$(BIN)/python" benchmarks/device/gpu.py --device cpu --smoke
	"$(BIN)/python" benchmarks/dropin/never_slower.py --smoke
	"$(BIN)/python" benchmarks/peers/compare.py --smoke --here --only 'penstock*' 'torch (simple*'

# Gigabytes: each peer has an environment of its own below .peers.
peers-environments: $(STAMP)
	"$(BIN)/python" benchmarks/peers/environments.py

# About an hour, in which nothing else may run. A peer that fails is on the page too.
peers: $(STAMP)
	"$(BIN)/python" benchmarks/peers/compare.py; status=$$?; "$(BIN)/python" benchmarks/peers/page.py && exit $$status

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
