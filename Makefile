# `make help` lists the targets.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
PINS   ?= constraints.txt
# pip would compile all modules, in a minute; Python compiles what is imported, and PYTEST lets it write the bytecode.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(PINS)
PYTEST  = CUDA_VISIBLE_DEVICES= PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' bertdata/__init__.py)

.PHONY: help demo test test-all check fix oldest bounds docs reference bench proof gpu gpu-dry outside campaign pages dist
.DELETE_ON_ERROR:

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | column -t -s '|'

demo: $(VENV)/.train  ## text to shards to a trained model, in some minutes; it reuses what is in demo/
	$(BIN)/bertdata demo

test: $(VENV)/.dev  ## the fast tests
	$(PYTEST) -m "not slow and not gpu and not dry and not outside"

test-all: $(VENV)/.dev  ## the fast and the slow tests
	$(PYTEST)

check: $(VENV)/.dev  ## format, lint, types and sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/size.py --check

fix: $(VENV)/.dev  ## correct format and lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

oldest:  ## the fast tests with the oldest packages that pyproject.toml allows
	$(MAKE) test VENV=$(VENV)-oldest PINS=constraints-oldest.txt

bounds: $(VENV)/.dev  ## the tests of the kernels, compiled with a check of every index
	NUMBA_BOUNDSCHECK=1 $(PYTEST) tests/test_kernels.py tests/test_text.py tests/test_samples.py tests/test_mix.py \
	    tests/test_words.py --deselect tests/test_words.py::test_code_points_alone_and_among_others \
	    tests/test_survive.py::test_every_flip_of_some_bytes_is_detected --every 100

# PUBLISH=1: mike writes the site into the directory of this version in the branch gh-pages, and pushes it.
docs: $(VENV)/.docs  ## the site in site/; a warning or a dead link is an error. PUBLISH=1 publishes it
ifdef PUBLISH
	$(INSTALL) mike
	export NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(BIN)):$$PATH" && \
	    mike deploy --push --update-aliases $(VERSION) latest && mike set-default --push latest
else
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --clean --quiet
endif

reference: $(VENV)/.dev  ## docs/errors.md, commands.md and api.md from the source
	$(BIN)/python tools/reference_pages.py

# BENCH: directory of the environments and intermediate results, which are reused. CORPUS: a text file.
# TOKENIZERS: directory with files of real tokenizers. BENCH_OPTIONS="--rounds 1 --minutes 0.5" is faster.
BENCH ?= .bench

bench: $(VENV)/.dev  ## comparison with other libraries: docs/benchmarks.md, benchmarks/results/comparison.json
	$(BIN)/python benchmarks/table.py --directory $(BENCH) $(if $(CORPUS),--corpus $(CORPUS)) \
	    $(if $(TOKENIZERS),--tokenizers $(TOKENIZERS)) $(BENCH_OPTIONS)

proof: $(VENV)/.train  ## the table of README, from committed results; RUN=1 ROW="reading" measures that row again
	$(if $(RUN),$(MAKE) bench BENCH_OPTIONS='--only "$(ROW)"')
	$(BIN)/python benchmarks/proof.py

# Uses the installed packages, and installs none. Each result is written at once, and a repeated command measures the rest.
GPU_PYTHON  = $(or $(wildcard $(BIN)/python),$(PYTHON))
GPU_TESTS  ?= -n 4 --dist worksteal
GPU_OUT    ?= benchmarks/results/gpu.jsonl
GPU_FACTS  ?= benchmarks/results/gpu_facts.jsonl
GPU_SECONDS ?= 240

gpu:  ## the tests and measurements that need a GPU, in ten minutes
	@$(GPU_PYTHON) -c "import sys, torch; torch.cuda.is_available() or \
	    sys.exit('torch finds no GPU here; run make gpu on a machine that has one')"
	$(GPU_PYTHON) benchmarks/gpu_facts.py --out $(GPU_FACTS)
	$(GPU_PYTHON) benchmarks/gpu_step.py --out $(GPU_OUT) --seconds $(GPU_SECONDS)
	$(GPU_PYTHON) -m pytest -m gpu $(GPU_TESTS) tests/test_gpu.py

gpu-dry: $(VENV)/.dev  ## what a CPU can check of the path on GPUs, in some minutes
	$(PYTEST) -m "not gpu" tests/test_gpu_dry.py tests/test_step.py

outside: $(VENV)/.dev  ## notebooks, and tests with other libraries in their own environments: mteb, transformers 4, MDS, litdata
	$(INSTALL) nbclient ipykernel
	$(BIN)/python tools/notebooks.py
	$(PYTEST) -m outside

# CAMPAIGN="--count 2000 --seed 7 --ranks 3,4". STATES="--steps 100000": builds, transfers, kills and damage in any order.
# CRASH=states: a loss of power at every moment of each command. CRASH="calls --only build,pull": failed system calls.
campaign: $(VENV)/.dev  ## 200 random runs, killed and resumed, bitwise identical; with STATES= or CRASH= those tools
	$(if $(STATES),$(PYTEST) -n 0 -s --timeout 0 tests/test_states.py $(STATES),$(BIN)/python tools/$(if $(CRASH),crash.py \
	    $(CRASH),campaign.py --out $(BENCH)/campaign $(CAMPAIGN)))

# playwright uses the installed Chromium, and downloads none.
pages: $(VENV)/.dev  ## every control of the pages of --html in Chromium, and the pictures of docs/
	$(INSTALL) playwright
	$(BIN)/python tools/pages.py --pictures docs

# TAG=v0.2.0 first checks that the tag, the version and the changelog agree.
dist: | $(BIN)/python  ## archives in dist/ and bom.cdx.json; the wheel is tried in a new environment
ifdef TAG
	test "$$TAG" = "v$(VERSION)"
	sed -n 's/^## //p' CHANGELOG.md | head -n 1 | grep -q "^$(VERSION) — 20..-..-..$$"
	grep -q '^Repository = "https://' pyproject.toml
endif
	rm -rf build dist
	$(INSTALL) build
	PIP_CONSTRAINT=$(abspath $(PINS)) $(BIN)/python -m build --outdir dist . > /dev/null
	new=$$(mktemp -d) && trap 'rm -r "$$new"' EXIT && $(PYTHON) -m venv "$$new" && \
	    "$$new/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl && cd "$$new" && \
	    printf 'one text\nanother text\n' > corpus.txt && \
	    bin/bertdata build corpus.txt --out shards --vocab-size 100 --validation 0 && bin/bertdata verify shards && bin/bertrain --help
	$(BIN)/python tools/bom.py dist/*.whl bom.cdx.json

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml $(PINS) | $(BIN)/python
	$(INSTALL) -e '.[train]'
	@touch $@

$(VENV)/.docs: pyproject.toml $(PINS) | $(BIN)/python
	$(INSTALL) -e '.[docs]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(PINS) | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.train
