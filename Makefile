# memlab: everything is installed into .venv beside this file, by uv where it is present, else by pip (see .ci/venv).
#
#   make lab  PORT=8899             JupyterLab on another port
#   make test ARGS="-k trace -x"    arguments for pytest
#   make lab  PYTHON=python3.12     another interpreter (replaces the .venv)
#   make test TORCH=2.12.1          another torch; a later call without TORCH goes back to the default

PYTHON ?=
TORCH ?= 2.13.0
PORT ?= 8888
CARD ?= RTX 4060
NOTEBOOK ?= work/01_one_step.ipynb
ARGS ?=
JOBS ?= 4
GPU := benchmarks/results/prediction-gpu

PY := .venv/bin/python
export PYTHON TORCH
export PIP_USER := 0
unexport PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help lab lab-simulated test test-quick test-cuda test-release agreement agreement-ranks check format bench gpu programs techniques course course-html docs dist release-check publish clean
.NOTPARALLEL:

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | while IFS='|' read -r name what; do printf '  make %-16s %s\n' "$$name" "$$what"; done
	@echo "  variables: TORCH=$(TORCH) PYTHON=python3.x PORT=$(PORT) ARGS=\"for pytest\""

define open-lab
	@set --; \
	case "$$(uname -s)" in Darwin) ;; *) [ -n "$$DISPLAY$$WAYLAND_DISPLAY$$BROWSER" ] || set -- --no-browser ;; esac; \
	[ "$$(id -u)" != 0 ] || set -- "$$@" --allow-root; \
	$(PY) notebooks/copies.py || exit; \
	echo "memlab: starting JupyterLab at port $(PORT), or the next free one (Ctrl-C twice stops it)"; \
	exec $(1) -m jupyterlab --log-level=WARN --LabApp.log_level=WARN --port=$(PORT) \
	    --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/$(NOTEBOOK) "$$@"
endef

lab: ready-lab  ## set up, then open JupyterLab on your copy of the first lesson (work/, which nothing overwrites)
	$(call open-lab,$(PY))

lab-simulated: ready-lab  ## the same on a simulated GPU, for example CARD="T4" (Linux; see docs/simulated_gpu.md)
	@.ci/cuda-venv lab
	$(call open-lab,.venv/cuda/bin/python -m memlab simulate --card "$(CARD)" -- python)

test: ready-test  ## set up, then run the tests that need neither GPU nor browser (minutes)
	$(PY) -m pytest -n 2 $(ARGS)

test-quick: ready-test  ## what to run after each change (under a minute)
	$(PY) -m pytest -n 2 -m quick $(ARGS)

test-cuda: ready-test  ## set up PyTorch's CUDA build, then run its tests on a simulated GPU (20 minutes)
	.ci/test-cuda $(ARGS)

test-release: ready-test ready-course  ## run what CI has only a sample of (an hour and more)
	$(PY) -m pytest -n 2 --release -m "course or release and not simulated" $(ARGS)
	.ci/test-cuda --release -m "release and simulated" $(ARGS)

agreement: ready-test  ## compare predictions with the allocator on a simulated GPU (half an hour); writes docs/agreement.md
	.ci/cuda-venv test third-party?
	$(PY) -m benchmarks.agreement --write $(ARGS)

agreement-ranks: ready-test  ## the same for ranks of distributed jobs (a quarter of an hour); writes docs/ranks_agreement.md
	.ci/cuda-venv test
	$(PY) -m benchmarks.ranks $(ARGS)

check: ready-dev  ## check format, lint and types; changes nothing
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

format: ready-dev  ## format the code and fix what the linter can
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: ready-test ready-bench  ## measure what tracking costs, compared with other tools; writes to benchmarks/
	$(PY) -m benchmarks.overhead $(ARGS)

gpu: ready-test  ## on a machine with a GPU: its tests and measurements, written to benchmarks/ (minutes; JOBS=4 programs at a time)
	$(PY) -m pytest -m gpu tests/gpu $(ARGS)
	$(PY) -m benchmarks.gpu
	$(PY) -m benchmarks.prediction measure --set libraries --jobs $(JOBS) $(GPU)-libraries.json
	$(PY) -m benchmarks.prediction measure --tight --jobs $(JOBS) $(GPU)-measured.json
	$(PY) -m benchmarks.prediction predict --jobs $(JOBS) $(GPU)-predicted.json --truth $(GPU)-measured.json
	$(PY) -m benchmarks.prediction compare $(GPU)-measured.json $(GPU)-predicted.json --out $(GPU).json --table $(GPU).md

programs: ready-test  ## predict every frozen case again and compare (half an hour; CI takes a sample)
	$(PY) -m pytest -m "slow or not slow" tests/frozen --release $(ARGS)

techniques: ready-test  ## compare the claimed saving of every technique with the measured one; writes docs/techniques.md
	$(PY) -m benchmarks.techniques

course: ready-course ready-browser  ## for maintainers: execute the lessons (ARGS="08 09" for some) and rebuild the pages around them
	$(PY) -m notebooks.build make $(ARGS)
	$(PY) -m notebooks.build map
	$(PY) -m notebooks.build tips

course-html: ready-course  ## write the course as pages that need no network, to artifacts/course
	$(PY) -m notebooks.build html

docs: ready-course ready-docs  ## build the documentation, with the course, into artifacts/site (a minute or two)
	$(PY) -m sphinx --fail-on-warning --keep-going -q -b html docs artifacts/site $(ARGS)
	@echo "open artifacts/site/index.html"

dist: ready-test  ## build the wheel and the sdist into dist/
	rm -rf dist
	$(PY) -m hatchling build

release-check: ready-test  ## refuse a release whose addresses, versions or checksum are not final
	$(PY) .ci/published.py release

publish: release-check dist  ## upload dist/ and make the release on GitHub (needs uv and gh, and is called by CI)
	uv publish dist/*
	gh release create "v$$($(PY) -m hatchling version)" dist/* --generate-notes

clean:  ## remove .venv, caches and test output; work/ stays
	rm -rf .venv artifacts build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ready-%:  # .venv with memlab[lab], [test], ... in it; done at once when nothing changed
	@sh "$(dir $(lastword $(MAKEFILE_LIST))).ci/venv" $*
