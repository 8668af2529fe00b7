# People and CI use the same targets. `make serve` and `make test` are all a fresh machine needs: they set up .venv themselves.

PYTHON ?= python3
MODEL ?= SmolLM2-135M-Instruct
ARGS ?=
SEEDS ?= 200

# On a machine without an NVIDIA GPU, where the configured package index would bring a CUDA build of torch, torch comes from here,
# if it answers. Set it to a mirror of your own, or set TORCH_BUILD=cuda or TORCH_BUILD=cpu to say which build you want.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_BUILD ?= auto
export TORCH_CPU_INDEX TORCH_BUILD

VENV := .venv
BIN := $(VENV)/bin
SETUP_INPUTS := scripts/setup.py pyproject.toml constraints.txt $(wildcard */pyproject.toml clients/python/pyproject.toml kernels/setup.py) \
	$(wildcard kernels/octavo_kernels/cpu/csrc/*)
PROTOS := $(shell find protos -name '*.proto' | sort)
SOURCES := clients/python/octavo router/octavo_router worker/octavo_worker kernels/octavo_kernels

# The tests of other people's clients start the server with this interpreter, and share an event loop, for such clients
# keep their connections.
SERVED_BY := OCTAVO_PYTHON=$(abspath $(BIN)/python)
ECOSYSTEM := -m pytest --confcutdir tests/ecosystem -o asyncio_default_test_loop_scope=session tests/ecosystem

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev serve test test-full test-ecosystem test-ecosystem-heavy simulate check format proto proto-clients bench bench-peers bench-paging bench-prefix bench-structured bench-router bench-scale bench-gpu roofline kernels-table up clean

help: ## Shows the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-20s %s\n", $$1, $$2}'

$(VENV)/.runtime: $(SETUP_INPUTS)
	$(PYTHON) scripts/setup.py --venv $(VENV)

$(VENV)/.dev: $(VENV)/.runtime
	$(PYTHON) scripts/setup.py --venv $(VENV) --dev

setup: $(VENV)/.runtime ## Makes .venv with the product in it and fetches the default model.

setup-dev: $(VENV)/.dev ## The same, with the tools that test and check.

serve: $(VENV)/.runtime ## Serves MODEL (the default model) over HTTP and gRPC. ARGS="--port 9000 …"
	@$(BIN)/octavo serve $(MODEL) $(ARGS)

test: $(VENV)/.dev ## Runs the tests. ARGS="tests/router -k stop"
	$(BIN)/python -m pytest -m "not full" --ignore tests/ecosystem $(ARGS)

test-full: $(VENV)/.dev ## Runs the whole matrix of equality tests as well. Takes long.
	$(BIN)/python -m pytest --timeout 3600 --ignore tests/ecosystem $(ARGS)

test-ecosystem: $(VENV)/.runtime ## Runs other people's clients (openai, langchain, Node, schemathesis, buf curl) against a served model.
	$(PYTHON) scripts/setup.py --venv .venv-ecosystem --peer ecosystem
	$(SERVED_BY) .venv-ecosystem/bin/python $(ECOSYSTEM) -m "not full" $(ARGS)

test-ecosystem-heavy: $(VENV)/.runtime ## The same with aiperf, guidellm and lm-eval, which bring torch.
	$(PYTHON) scripts/setup.py --venv .venv-ecosystem-heavy --peer ecosystem-heavy
	$(SERVED_BY) .venv-ecosystem-heavy/bin/python $(ECOSYSTEM) $(ARGS)

simulate: $(VENV)/.dev ## Simulates the router's core. SEEDS=2000 (a count), SEEDS=9000:9040 (a range), ARGS="--trace"
	$(BIN)/python -m tests.simulator.run --seeds $(SEEDS) $(ARGS)

check: $(VENV)/.dev ## Lints, checks types, the contract, generated code and who may import whom.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES)
	cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf format --diff --exit-code
	$(BIN)/python scripts/check_contract.py
	$(BIN)/lint-imports

format: $(VENV)/.dev ## Formats Python and protos.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	cd protos && ../$(BIN)/buf format --write

proto: $(VENV)/.dev ## Generates the Python stubs from protos/.
	$(BIN)/python scripts/generate_stubs.py clients/python

proto-clients: $(VENV)/.dev ## Generates the Go and TypeScript stubs, where their generators are installed.
	$(BIN)/python scripts/generate_client_stubs.py

bench: $(VENV)/.runtime ## Compares speed side by side with transformers, in one run.
	$(BIN)/python benchmarks/bench_peers.py --modes octavo-bf16 --peers transformers $(ARGS)

bench-peers: $(VENV)/.runtime ## Compares speed with llama.cpp, OpenVINO GenAI and vLLM, in one run. The first time it installs them.
	$(BIN)/python benchmarks/bench_peers.py $(ARGS)

bench-paging: $(VENV)/.runtime ## Compares paged KV memory with slots of the maximum length and static batches, in one run.
	$(BIN)/python benchmarks/bench_paging.py $(ARGS)

bench-prefix: $(VENV)/.runtime ## Measures the time to the first token behind a cached prefix.
	$(BIN)/python benchmarks/bench_prefix.py $(ARGS)

bench-structured: $(VENV)/.runtime ## Measures what a JSON schema costs in throughput.
	$(BIN)/python benchmarks/bench_structured.py $(ARGS)

bench-router: $(VENV)/.runtime ## Measures the router alone, against a worker that answers at once.
	$(BIN)/python benchmarks/bench_router.py $(ARGS)

bench-scale: $(VENV)/.runtime ## Measures how times grow with waiting requests, with the context and with the batch.
	$(BIN)/python benchmarks/bench_scale.py $(ARGS)

bench-gpu: ## Measures kernels, a model and swap on a GPU, beside transformers. PYTHON is one with torch, triton and transformers. ARGS="--out DIR"
	$(PYTHON) benchmarks/bench_gpu.py $(ARGS)

roofline: $(VENV)/.runtime ## Computes the floor of a model's steps on a device. ARGS="llama-3-8b --device h200"
	@$(BIN)/python benchmarks/roofline.py $(ARGS)

kernels-table: $(VENV)/.dev ## Compiles the GPU kernels, without a GPU, and prints registers, shared memory and spills. ARGS="--op rms_norm"
	$(BIN)/python -m octavo_kernels.triton.compile_table $(ARGS)

up: ## Builds the images and starts router and worker in containers.
	@if docker compose version >/dev/null 2>&1; then docker compose up --build $(ARGS); else docker-compose up --build $(ARGS); fi

clean: ## Removes .venv and everything built.
	rm -rf $(VENV) .venv-bench* .venv-ecosystem .venv-ecosystem-heavy build */build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	rm -rf clients/typescript/node_modules clients/typescript/dist
	find . -name __pycache__ -o -name '*.egg-info' -o -name '*.so' -not -path './.git/*' | xargs rm -rf
