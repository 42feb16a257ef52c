# make help lists the targets.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
# Bytecode is written, whatever the environment says: without it every process of the tests compiles all modules.
PYTEST  = CUDA_VISIBLE_DEVICES= PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal
PINS   ?= constraints.txt
# Modules are compiled when they are first imported: most of those that pip would compile, in a minute, never are.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(PINS)

.PHONY: help demo bench proof test test-all oldest bounds campaign crash states gpu gpu-dry outside pages docs check \
    fix reference golden dist bom tagged publish-docs
.DELETE_ON_ERROR:

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | column -t -s '|'

# What is there already is used again; `rm -r demo` starts anew.
demo: $(VENV)/.train  ## text to shards to a trained model, in a few minutes
	$(BIN)/bertdata demo

# Ours beside other engines: docs/benchmarks.md. BENCH is where their environments and all results on the way are; what is
# there is used again. CORPUS=file takes a text of yours. TOKENIZERS=directory has files of real tokenizers.
# BENCH_OPTIONS="--rounds 1 --minutes 0.5" is quicker.
BENCH ?= .bench

bench: $(VENV)/.train  ## a comparison with other libraries: writes benchmarks/results/comparison.json
	$(BIN)/python benchmarks/table.py --directory $(BENCH) $(if $(CORPUS),--corpus $(CORPUS)) \
	    $(if $(TOKENIZERS),--tokenizers $(TOKENIZERS)) $(BENCH_OPTIONS)

proof: $(VENV)/.train  ## the table of README, from committed results; RUN=1 repeats what takes minutes
	$(BIN)/python benchmarks/proof.py $(if $(RUN),--run)

# The quick tests. test-all runs the slow ones too.
test: $(VENV)/.dev  ## the quick tests
	$(PYTEST) -m "not slow and not gpu and not dry and not outside"

test-all: $(VENV)/.dev  ## all tests that need no GPU
	$(PYTEST)

oldest:  ## the quick tests with the oldest versions that pyproject.toml allows
	$(MAKE) test VENV=$(VENV)-oldest PINS=constraints-oldest.txt

# The kernels once more with their indices checked, which takes them compiled anew.
bounds: $(VENV)/.dev  ## the tests of the kernels, with every index checked
	NUMBA_BOUNDSCHECK=1 $(PYTEST) tests/test_kernels.py tests/test_text.py tests/test_samples.py tests/test_mix.py tests/test_engine.py \
	    tests/test_words.py::test_any_text_is_cut_as_by_the_automaton tests/test_words.py::test_a_word_with_a_zero_byte_may_end_in_the_next_window
	cache=$$(mktemp -d) && trap 'rm -r "$$cache"' EXIT && \
	    NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR="$$cache" $(BIN)/python tools/damage.py flips --every 40

# CAMPAIGN="--count 2000 --seed 7 --ranks 3,4 --steps 12" makes others. The directories of runs that differ stay.
campaign: $(VENV)/.dev  ## 200 runs of options drawn at random, killed and resumed, to the same bits
	$(BIN)/python tools/campaign.py --out $(BENCH)/campaign $(CAMPAIGN)

# CRASH="calls --only build,pull" fails calls to the system in place of the power. Needs a C compiler; Linux on x86-64.
crash: $(VENV)/.dev  ## loses power at every moment of each command, and runs it again; takes an hour
	$(BIN)/python tools/crash.py $(or $(CRASH),states)

# STATES="--steps 5000 --seed 7" makes others. It prints the counts after each thousand steps.
states: $(VENV)/.dev  ## 100,000 steps: builds and transfers in any order, killed and damaged, against a model; takes hours
	$(BIN)/python tools/states.py $(STATES)

# What needs a GPU: what the GPU itself does, the speed of a training step, then the tests. Takes the environment, if there
# is one, else what python3 has, and installs nothing. Each line of a result is written at once, so it can be stopped. It
# ends in about ten minutes; run it again for the cases that it left out.
GPU_PYTHON  = $(or $(wildcard $(BIN)/python),$(PYTHON))
GPU_TESTS  ?= -n 4 --dist worksteal
GPU_OUT    ?= benchmarks/results/gpu.jsonl
GPU_FACTS  ?= benchmarks/results/gpu_facts.jsonl
GPU_SECONDS ?= 240

gpu:  ## the tests and measurements that need a GPU
	@$(GPU_PYTHON) -c "import sys, torch; torch.cuda.is_available() or \
	    sys.exit('torch finds no GPU here; run make gpu on a machine that has one')"
	$(GPU_PYTHON) benchmarks/gpu_facts.py --out $(GPU_FACTS)
	$(GPU_PYTHON) benchmarks/gpu_step.py --out $(GPU_OUT) --seconds $(GPU_SECONDS)
	$(GPU_PYTHON) -m pytest -m gpu $(GPU_TESTS) tests/test_gpu.py

# Notebooks with what they print, and libraries of others, each in its environment. The notebooks are written anew where they are.
outside: $(VENV)/.dev  ## what needs packages that are no part of the tests: notebooks, EuroEval, mteb, MDS, litdata; some minutes
	$(INSTALL) nbclient ipykernel
	$(BIN)/python tools/notebooks.py
	$(PYTEST) -m outside

# Before a GPU is rented: the same path as far as a CPU can follow it. docs/gpu.md says what that shows.
gpu-dry: $(VENV)/.dev  ## what a CPU can show of the path on GPUs, in some minutes
	$(PYTEST) -m "not gpu" tests/test_gpu_dry.py tests/test_step.py tests/test_finite.py

# Pages in a real browser. playwright drives the Chromium that is installed, and downloads none.
pages: $(VENV)/.dev  ## the pages of --html in Chromium: uses every control, makes pictures for docs/
	$(INSTALL) playwright
	$(BIN)/python tools/pages.py --pictures docs

# A stranger reads it in a browser: `python3 -m http.server --directory site`. Nothing in it comes from another host.
docs: $(VENV)/.docs  ## the site in site/, from docs/ and the source; a warning or a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --clean --quiet

check: $(VENV)/.dev  ## format, lint, types and sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/size.py --check

fix: $(VENV)/.dev  ## repair format and lint where that can be done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

reference: $(VENV)/.dev  ## docs/errors.md, commands.md and api.md from the source
	$(BIN)/python tools/reference_pages.py

golden: $(VENV)/.dev  ## golden files of the present format
	$(BIN)/python tools/golden.py

dist: | $(BIN)/python  ## the archives of a release in dist/; the wheel is tried in an environment of its own
	rm -rf build dist
	$(INSTALL) build
	PIP_CONSTRAINT=$(abspath $(PINS)) $(BIN)/python -m build --outdir dist . > /dev/null
	new=$$(mktemp -d) && trap 'rm -r "$$new"' EXIT && $(PYTHON) -m venv "$$new" && \
	    "$$new/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl && cd "$$new" && \
	    printf 'one text\nanother text\n' > corpus.txt && \
	    bin/bertdata build corpus.txt --out shards --vocab-size 100 --validation 0 && bin/bertdata verify shards && bin/bertrain --help

bom: | $(BIN)/python  ## bom.cdx.json: the packages of constraints.txt that the wheel in dist/ installs with the extra train
	$(BIN)/python tools/bom.py dist/*.whl bom.cdx.json

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' bertdata/__init__.py)

tagged:  ## fails unless TAG is the version, the changelog begins with it, and the repository's address is in pyproject.toml
	test "$$TAG" = "v$(VERSION)"
	sed -n 's/^## //p' CHANGELOG.md | head -n 1 | grep -q "^$(VERSION) — 20..-..-..$$"
	grep -q '^Repository = "https://' pyproject.toml

# mike keeps a directory for each version in the branch gh-pages, and `latest` is the newest one.
publish-docs: $(VENV)/.docs  ## puts the site of this version beside those of older ones, and pushes them
	$(INSTALL) mike
	export NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(BIN)):$$PATH" && \
	    mike deploy --push --update-aliases $(VERSION) latest && mike set-default --push latest

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
