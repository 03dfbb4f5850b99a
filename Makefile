# memlab: everything happens in .venv beside this file. Needs Python, pip and GNU make; `make help` says the rest.
#
#   make lab  PORT=8899             JupyterLab on another port
#   make test ARGS="-k trace -x"    arguments for pytest
#   make lab  PYTHON=python3.12     another interpreter (the .venv is made anew)
#   make test TORCH=2.12.1          another torch; a later call without TORCH goes back to the default

PYTHON ?=
TORCH ?= 2.13.0
PORT ?= 8888
NOTEBOOK ?= notebooks/01_one_step.ipynb
ARGS ?=
GPU_RESULTS := benchmarks/results/prediction-gpu

SHELL := /bin/sh
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input
export PIP_USER := 0
unexport PYTHONHOME PYTHONPATH

# What an installation depends on. The folder belongs to it: a copied .venv would still import memlab from the old place.
KEY := $(shell { pwd; cat pyproject.toml constraints.txt; } 2>/dev/null | cksum | cut -d' ' -f1)
STAMPS := .venv/memlab-stamps
STAMP = $(STAMPS)/$(TORCH)-$(KEY)

.DEFAULT_GOAL := help
.PHONY: help lab test check format bench gpu techniques course course-html clean
.NOTPARALLEL:

help:  ## these lines
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | while IFS='|' read -r name what; do printf '  make %-16s %s\n' "$$name" "$$what"; done
	@echo "  variables: TORCH=$(TORCH) PYTHON=python3.x PORT=$(PORT) ARGS=\"for pytest\""

lab: ready-lab  ## set up, then open JupyterLab on the first lesson
	@set --; \
	case "$$(uname -s)" in Darwin) ;; *) [ -n "$$DISPLAY$$WAYLAND_DISPLAY$$BROWSER" ] || set -- --no-browser ;; esac; \
	[ "$$(id -u)" != 0 ] || set -- "$$@" --allow-root; \
	echo "memlab: starting JupyterLab at port $(PORT), or the next free one (Ctrl-C twice stops it)"; \
	exec $(PY) -m jupyterlab --log-level=WARN --LabApp.log_level=WARN --port=$(PORT) \
	    --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/$(NOTEBOOK) "$$@"

test: ready-test  ## set up, then run the tests that need neither GPU nor browser
	$(PY) -m pytest -n 2 $(ARGS)

check: ready-dev  ## format, lint, types; changes nothing
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

format: ready-dev  ## write the format, mend what the linter can
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: ready-test ready-bench  ## what tracking costs, beside other tools; writes to benchmarks/
	$(PY) -m benchmarks.overhead $(ARGS)

gpu: ready-test  ## on a machine with a GPU: its tests, then what it measures, written to benchmarks/
	$(PY) -m pytest -m gpu tests/gpu $(ARGS)
	$(PY) -m benchmarks.gpu
	$(PY) -m benchmarks.prediction measure --tight $(GPU_RESULTS)-measured.json
	$(PY) -m benchmarks.prediction predict $(GPU_RESULTS)-predicted.json --truth $(GPU_RESULTS)-measured.json
	$(PY) -m benchmarks.prediction compare $(GPU_RESULTS)-measured.json $(GPU_RESULTS)-predicted.json --out $(GPU_RESULTS).json --table $(GPU_RESULTS).md

course: ready-course ready-browser  ## for maintainers: execute the lessons (ARGS="08 09" for some), draw their pictures, renew the pages around them
	$(PY) -m notebooks.build make $(ARGS)
	$(PY) -m notebooks.build map
	$(PY) -m notebooks.build tips

course-html: ready-course  ## the course as pages that need no network, in artifacts/course
	$(PY) -m notebooks.build html

techniques: ready-test  ## what every technique is said to save beside what it saves; writes docs/techniques.md
	$(PY) -m benchmarks.techniques

clean:  ## remove .venv, caches and what the tests made
	rm -rf .venv artifacts build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ready-lab: .venv with memlab[lab] in it. Always asked, answered at once when the stamp is there. Making a stamp removes those
# of other torch versions or dependencies: they tell of a .venv that is no more.
ready-%:
	$(MAKE_VENV)
	@[ ! -e $(STAMP)-$* ] || exit 0; \
	set -e; mkdir -p $(STAMPS); \
	for stamp in $(STAMPS)/*; do case $$stamp in $(STAMP)-*) ;; *) rm -f "$$stamp" ;; esac; done; \
	quiet="-q --progress-bar off"; \
	case $$($(PIP) show torch 2>/dev/null | sed -n 's/^Version: //p') in $(TORCH)|$(TORCH)+*) ;; *) \
	    [ ! -t 1 ] || quiet=; \
	    echo "memlab: getting torch $(TORCH), the first time perhaps a download of a few GB" ;; \
	esac; \
	echo "memlab: installing memlab[$*] into .venv"; \
	$(PIP) install $$quiet --log .venv/memlab-pip.log "torch==$(TORCH)" -e ".[$*]" -c constraints.txt || { \
	    echo "memlab: pip could not install memlab[$*] with torch $(TORCH); why stands at the end of .venv/memlab-pip.log" >&2; exit 1; \
	}; \
	touch $(STAMP)-$*

# The first Python in range, unless PYTHON names one; another PYTHON than that of the .venv replaces the .venv.
# Debian's Python may lack ensurepip; then its pip puts one into the .venv.
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
WHOSE := import sys; print(sys.version_info[:2], sys.base_prefix)
define MAKE_VENV
	@if $(PY) -c '$(FITS)' 2>/dev/null; then \
	    [ -n "$(PYTHON)" ] || exit 0; \
	    [ "$$($(PY) -c '$(WHOSE)')" != "$$("$(PYTHON)" -c '$(WHOSE)' 2>/dev/null)" ] || exit 0; \
	fi; \
	for python in $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11); do \
	    if "$$python" -c '$(FITS)' 2>/dev/null; then found=$$python; break; fi; \
	    version=$$("$$python" -c 'import platform; print(platform.python_version())' 2>/dev/null) || continue; \
	    seen="$$seen; $$python is $$version"; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "memlab: needs Python 3.11, 3.12 or 3.13$${seen:-; $(or $(PYTHON),python3) does not run}. Name one: make PYTHON=/path/to/python3.12 ..." >&2; \
	    exit 1; \
	fi; \
	echo "memlab: making .venv with $$("$$found" -V)"; \
	rm -rf .venv; \
	"$$found" -m venv .venv >/dev/null 2>&1 || { \
	    "$$found" -m venv --clear --without-pip .venv && "$$found" -m pip -q --python $(PY) install pip; \
	} || { \
	    rm -rf .venv; \
	    echo "memlab: could not make .venv: $$found needs its module venv and a pip (on Debian: python3-venv)" >&2; \
	    exit 1; \
	}
endef
