# make help lists what there is. Variables: PYTHON, TORCH=system, RECIPE, CONFIG, ARGS.
PYTHON ?= python3
VENV ?= .venv
# An environment that was made with TORCH=system stays so for every later target, until told otherwise.
TORCH ?= $(patsubst $(VENV)/.ready-%,%,$(firstword $(wildcard $(VENV)/.ready-*) $(VENV)/.ready-pinned))
RECIPE ?= fp8_hybrid
CONFIG ?=
ARGS ?=
MINUTES ?= 20
SEED ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(TORCH)
TEST_READY := $(VENV)/.test-ready
EXTRAS_READY := $(VENV)/.extras-ready
# .venv/bin first: the deepspeed launcher starts `python` and `ninja` from PATH.
# Compiled once: where PYTHONDONTWRITEBYTECODE is set, every process would compile all of torch again.
RUN := PYTHONDONTWRITEBYTECODE= PATH="$(abspath $(BIN)):$$PATH"

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all test-te test-paper test-slow test-nightly test-extras test-ui test-gpu test-faults attack proof mutations lint clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo 'variables: RECIPE=fp8_hybrid CONFIG= ARGS="train.steps=50" PYTHON=python3.12 TORCH=system (reuse an installed torch)'

setup: $(READY) ## make .venv from the pinned versions

train: $(READY) ## train the quickstart model (RECIPE=, CONFIG=, ARGS=); run it again to resume
	@$(RUN) launch/deepspeed.sh --recipe $(RECIPE) $(if $(CONFIG),--config $(CONFIG)) $(ARGS)

test: lint ## lint, types of the code, then every quick test that needs no GPU
	$(RUN) OMP_NUM_THREADS=1 python -m pytest -q --timeout 600 -n 2 --dist worksteal --ignore tests/cuda_on_paper --ignore tests/extras \
	    -m "not slow and not nightly and not gpu" $(ARGS)

test-all: test-te test-paper test-slow test-extras ## what make test leaves out: Transformer Engine, paper and slow tests (half an hour)

# Each of the next two changes the process that it runs in (another Transformer Engine, another CUDA): never together.
test-te: $(TEST_READY) ## Transformer Engine's own Python on the CPU, in the newest version that is supported
	@# Without network the tests say why they are skipped; where CI is set they fail instead.
	@$(RUN) python tests/te_cpu/te_wheels.py || true
	$(RUN) OMP_NUM_THREADS=1 TE_VERSION=2.20.2 python -m pytest -q --timeout 1200 -n 2 --dist loadfile tests/te_cpu $(ARGS)

test-paper: $(TEST_READY) ## the CUDA step on fake tensors of an H100, A100 and T4; no card is needed
	$(RUN) OMP_NUM_THREADS=1 python -m pytest -q --timeout 1200 -n 2 --dist worksteal -m "not nightly" tests/cuda_on_paper $(ARGS)

test-slow: $(TEST_READY) ## types of tests/, then the slow tests; the attacks among them are left to make test-faults
	$(RUN) python -m pyright tests
	@# These wait a third of their time, for servers, launchers and signals: three at a time keep two processors busy.
	$(RUN) OMP_NUM_THREADS=1 python -m pytest -q --timeout 1200 -n 3 --dist worksteal --ignore tests/cuda_on_paper --ignore tests/extras \
	    -m "slow and not attack and not nightly and not gpu" $(ARGS)

test-nightly: $(EXTRAS_READY) ## what CI has no time for: studies, rehearsals, the rarer half of a matrix, TE's older versions
	@$(RUN) python tests/te_cpu/te_wheels.py || true
	$(RUN) OMP_NUM_THREADS=1 TE_VERSION=2.18.0 python -m pytest -q --timeout 1200 -n 2 --dist loadfile tests/te_cpu $(ARGS)
	$(RUN) OMP_NUM_THREADS=1 TE_VERSION=2.19.0 python -m pytest -q --timeout 1200 -n 2 --dist loadfile tests/te_cpu $(ARGS)
	$(RUN) OMP_NUM_THREADS=1 python -m pytest -q --timeout 2400 -n 2 --dist worksteal --ignore tests/cuda_on_paper --ignore tests/extras \
	    -m "nightly and not gpu" $(ARGS)
	$(RUN) OMP_NUM_THREADS=1 python -m pytest -q --timeout 2400 -m nightly tests/cuda_on_paper $(ARGS)
	$(RUN) OMP_NUM_THREADS=1 python -m pytest -q --timeout 2400 -W default -m nightly tests/extras $(ARGS)

test-extras: $(EXTRAS_READY) ## with the libraries that people bring: Hugging Face, Lightning, accelerate, peft
	$(RUN) OMP_NUM_THREADS=1 python -m pytest -q --timeout 1200 -n 2 --dist worksteal -W default -m "not nightly" tests/extras $(ARGS)

test-ui: $(TEST_READY) ## MLflow's real pages in Chromium, on a large run
	$(RUN) UI=1 OMP_NUM_THREADS=1 python -m pytest -q -s --timeout 3000 tests/ui $(ARGS)

test-gpu: $(TEST_READY) ## the tests that need an NVIDIA GPU
	@# Another torch, driver or Transformer Engine may warn of what this project cannot change.
	$(RUN) python -m pytest -q --timeout 600 -W default -m gpu $(ARGS)

proof: $(TEST_READY) ## on a machine with an NVIDIA GPU: what runs, how fast, against what was predicted (29 minutes; ARGS='--resume RECORD.json' goes on, ARGS=--rehearse: on a CPU)
	$(RUN) python -m benchmarks.proof $(ARGS)

test-faults: $(TEST_READY) ## every fault injection, slow ones too (within an hour); writes docs/studies/reliability.md
	@mkdir -p build && rm -f build/figures.jsonl
	$(RUN) OMP_NUM_THREADS=1 FAULT_FIGURES="$(abspath build/figures.jsonl)" \
	    python -m pytest -q --timeout 1200 -n 2 --dist worksteal -m "faults and not gpu" $(ARGS)
	$(RUN) python tests/faults/reliability_page.py build/figures.jsonl docs/studies/reliability.md

attack: $(TEST_READY) ## random sequences of faults against small runs (MINUTES=20 SEED=; ARGS='--count 1': a failure again); adds to its ledger
	$(RUN) OMP_NUM_THREADS=1 python tests/faults/attack.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

mutations: $(EXTRAS_READY) ## take each protection away and see that a test notices (about two hours)
	@$(RUN) python tests/te_cpu/te_wheels.py || true
	$(RUN) OMP_NUM_THREADS=1 python tests/faults/mutations.py $(ARGS)

lint: $(TEST_READY) ## ruff, and pyright of harness, launch and examples
	$(RUN) python -m ruff check .
	$(RUN) python -m ruff format --check .
	@# Half of what pyright takes is tests/: make test-slow checks that half.
	$(RUN) python -m pyright harness launch examples

clean: ## delete .venv and caches; runs/ and mlflow.db stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
	find harness launch tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt launch/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH="$(TORCH)" launch/setup.sh run
	@rm -f $(VENV)/.ready-* $(TEST_READY) $(EXTRAS_READY) && touch $@

$(TEST_READY): $(READY)
	@VENV="$(VENV)" launch/setup.sh test
	@touch $@

$(EXTRAS_READY): $(TEST_READY)
	@VENV="$(VENV)" launch/setup.sh extras
	@touch $@
