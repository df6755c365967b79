# `make` alone lists the targets. Each makes the environment first where it is not there or out of date. Variables:
#   PYTHON=python3.12          the interpreter that .venv is made from
#   TORCH="torch==2.12.*"      the torch to install, instead of the choice that tools/setup_env.py makes
#   MODEL=DIR                  the checkpoint that `serve` loads, instead of the one that comes with the package
#   TESTS=tests/engine         what `test` runs
#   ARGS="--port 50052"        more arguments for serve, test, gpu-test and bench
VENV   := .venv
PYTHON ?= $(if $(wildcard $(VENV)/.ready),$(VENV)/bin/python,python3)
TORCH  ?=
MODEL  ?=
TESTS  ?= tests
ARGS   ?=
# a file's tests share servers and ranks, so they stay together; each worker takes a core and about 2 GB
SPREAD := -n auto --maxprocesses 4 --dist loadfile
# what takes long, or processes of its own: several ranks, a compiler, benchmarks, training; `test` leaves it to `test-long`
LONG   := tests/parallel tests/ranks tests/scenes tests/benchmarks/test_service.py tests/benchmarks/test_fuzz.py tests/benchmarks/test_restarts.py \
          tests/ops/test_build.py tests/features/test_each.py tests/features/test_lora_formats.py tests/features/test_pairs.py tests/features/test_cuda_graphs.py \
          tests/house/test_contracts.py tests/models/test_tiny_checkpoints.py tests/models/test_before_and_after.py \
          tests/adapter/test_randomness.py tests/benchmarks/test_fleet.py tests/fleet/test_serve_several.py tests/worker/test_phases.py \
          tests/worker/test_measure.py tests/cli/test_advise.py tests/cli/test_signals.py tests/benchmarks/test_gpu_adapter.py \
          tests/server/test_quiet_start.py tests/server/test_serve_faults.py tests/server/test_real_pipelines.py \
          tests/engine/test_rank_executor.py tests/engine/test_rank_link.py tests/hub/test_serve_hub.py \
          tests/adapter/test_settings_references.py tests/models/test_conformance.py tests/ops/test_families.py \
          tests/ops/test_compile_cache.py tests/house/test_native_build.py tests/worker/test_memory.py tests/adapter/test_end_to_end.py \
          tests/telemetry/test_real_worker.py tests/telemetry/test_logs.py \
          tests/server/test_handover.py tests/server/test_handover_processes.py tests/cli/test_bench_serve.py \
          tests/cli/test_bench_compare.py tests/worker/test_recording.py tests/worker/test_vitals.py \
          tests/features/test_lora_kinds.py tests/features/test_lora_caches.py tests/adapter/test_sigmas.py \
          tests/benchmarks/test_lora_sequences.py tests/cli/test_calibrate.py tests/presets/test_end_to_end.py
# what needs a database, an object store, a receiver or a proxy beside the server
SERVICES := tests/store tests/lasting tests/webhooks tests/web/test_proxies.py
# what breaks things on purpose around servers; one after the other, since each fault wants the machine
CHAOS  := tests/chaos
# what needs the extra of that name; one after the other, since each Ray is some ten processes
RAY    := tests/ray
# what needs Node.js, and OpenAI's client for it
OPENAI := tests/web/openai/node
# the page in Chromium
WEB    := tests/web_page
# images, units and manifests
DEPLOY := tests/deploy
# the clients of other languages, with their toolchains
CLIENTS := tests/clients
LANGUAGES := python typescript go cpp java
WHOLE  := $(filter tests,$(TESTS))
BIN    := $(VENV)/bin
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' omni_grpc/types/version.py)

.DEFAULT_GOAL := help
.PHONY: help setup gen-setup serve demo test test-long test-services test-chaos ray-setup test-ray test-openai web-setup web web-check test-web clients test-clients deploy-check image image-cuda lint commit-lint audit house gen checkgen includes-check cuda-check oldest-torch cpu-clones gpu-test bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## make .venv: torch, the package and its tools (again only when something changed)
	@$(PYTHON) tools/setup_env.py $(if $(TORCH),--torch "$(TORCH)")

serve: setup ## serve MODEL over gRPC (default: the small model that comes with the package)
	$(BIN)/python -m omni_grpc.serve $(if $(MODEL),--model $(MODEL)) $(ARGS)

demo: setup ## serve the small model and generate one image with streamed progress
	@$(BIN)/python -m tools.demo

test: setup ## run the tests that need no GPU and little time (TESTS=tests/engine narrows them)
	$(BIN)/python -m pytest -m "not gpu" $(if $(WHOLE),$(SPREAD) $(LONG:%=--ignore=%) $(SERVICES:%=--ignore=%) $(CHAOS:%=--ignore=%) $(RAY:%=--ignore=%) $(OPENAI:%=--ignore=%) $(WEB:%=--ignore=%) $(CLIENTS:%=--ignore=%) $(DEPLOY:%=--ignore=%)) $(strip $(TESTS) $(ARGS))
	@$(if $(WHOLE),echo "left out: make test-services ($(SERVICES)); make test-chaos ($(CHAOS)); make test-ray ($(RAY)); make test-openai ($(OPENAI)); make test-web ($(WEB)); make test-clients ($(CLIENTS)); make deploy-check ($(DEPLOY)); make test-long ($(LONG)); make gpu-test (what needs a GPU)")

test-long: setup ## run the tests that `test` leaves out and that need no GPU: ranks, benchmarks, compilers, pairs
	$(BIN)/python -m pytest -m "not gpu" $(SPREAD) $(LONG) $(ARGS)

test-services: setup ## run the tests of what lasts: SQLite, PostgreSQL (skipped where it is not), S3, webhooks, restarts
	$(BIN)/python -m pytest -m "not gpu" $(SPREAD) $(SERVICES) $(ARGS)

test-chaos: setup ## strike real servers with each fault of docs/reliability.md once; faults of disks need root
	$(BIN)/python -m pytest -m "not gpu" $(CHAOS) $(ARGS)

ray-setup: setup
	@$(PYTHON) tools/setup_env.py --ray

test-ray: ray-setup ## run the tests of workers in a Ray cluster of this machine; installs the extra `ray`
	TESTS_REQUIRE_RAY=1 $(BIN)/python -m pytest -m "not gpu" $(RAY) $(ARGS)

test-openai: setup ## test OpenAI's endpoints with its client for Node.js, which needs node and npm
	@cd $(OPENAI) && npm ci --silent --ignore-scripts
	$(BIN)/python -m pytest -m "not gpu" $(OPENAI) $(ARGS)

web-setup:
	@cd clients/web && npm ci --silent

web: gen-setup web-setup ## build the page of the HTTP port into omni_grpc/web/page; needs node and npm
	$(VENV)/gen/bin/python tools/gen_web_protos.py
	@cd clients/web && npm run --silent build

web-check: gen-setup web-setup ## check the page: types, style, size, and that the committed bundle is that of its sources
	$(VENV)/gen/bin/python tools/gen_web_protos.py --check
	@cd clients/web && npm run --silent check && npm run --silent verify

test-web: setup web-setup ## test the page in Chromium, which must be there (apt install chromium), as must npm
	$(BIN)/python -m pytest -m "not gpu" $(WEB) $(ARGS)

clients: setup ## build the clients of other languages, and check and test each by itself (LANGUAGES=go narrows)
	@failed=; for language in $(LANGUAGES); do for target in setup build check test package; do \
		echo "clients/$$language: $$target"; \
		$(MAKE) --no-print-directory -C clients/$$language $$target || { failed="$$failed $$language"; break; }; \
	done; done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

test-clients: setup web-setup ## run the list of behaviours that all clients share, with those that `make clients` has built
	$(BIN)/python -m pytest -m "not gpu" -n auto --maxprocesses 4 --dist loadgroup $(CLIENTS) $(ARGS)

deploy-check: setup ## check image, compose files, unit and manifests against schemas and the server; needs no docker and no cluster
	$(BIN)/python -m pytest $(DEPLOY) $(ARGS)

image: ## build the image for CPUs with docker
	docker build -f deploy/Dockerfile --target cpu -t omni-grpc:$(VERSION)-cpu $(ARGS) .

image-cuda: ## build the image for NVIDIA GPUs with docker (ARGS="--build-arg CUDA_ARCHS=90a": for Hopper alone)
	docker build -f deploy/Dockerfile --target cuda -t omni-grpc:$(VERSION) $(ARGS) .

lint: setup ## ruff, mypy, the import contracts, buf and the commit messages
	@failed=0; for check in "ruff check ." "ruff format --check ." mypy lint-imports "buf lint"; do \
		echo "$$check"; $(BIN)/$$check || failed=1; \
	done; \
	$(BIN)/python tools/commit_lint.py || failed=1; exit $$failed

commit-lint: setup ## check the messages of the commits since the newest version tag
	@$(BIN)/python tools/commit_lint.py

audit: setup ## look for secrets in the files (ARGS=--vulnerabilities: and for known ones in what is installed)
	@$(BIN)/python tools/audit.py $(ARGS)

house: setup ## print figures of the code: rooms, arrows, sizes, names, docstrings
	@$(BIN)/python tools/house_figures.py

includes-check: setup ## check that every C++ and CUDA file includes what it uses, and compile with clang and libc++
	@$(BIN)/python tools/includes_check.py

gen-setup: setup
	@$(PYTHON) tools/setup_env.py --gen

gen: gen-setup ## generate the gRPC stubs, the synchronous client, and the keywords of requests
	$(BIN)/python tools/gen_request_options.py
	$(BIN)/python tools/gen_sync_client.py
	$(VENV)/gen/bin/python tools/gen_protos.py

checkgen: gen-setup ## fail if a committed file is not what `make gen` generates
	$(BIN)/python tools/gen_request_options.py --check
	$(BIN)/python tools/gen_sync_client.py --check
	$(VENV)/gen/bin/python tools/gen_protos.py --check

cuda-check: setup ## compile every CUDA kernel with nvcc alone; needs no GPU
	$(BIN)/python tools/cuda_check.py

oldest-torch: setup ## compile the bindings with the headers of the oldest torch
	$(BIN)/python tools/oldest_torch.py

cpu-clones: setup ## test the CPU kernels of narrower processors on this one
	$(BIN)/python tools/cpu_clones.py

gpu-test: setup ## run the tests that need a GPU
	$(BIN)/python tools/gpu_test.py $(ARGS)

bench: setup ## time the ops against what they replace
	@for file in benchmarks/bench_*.py; do echo "$$file"; $(BIN)/python $$file $(ARGS) || [ $$? = 77 ] || exit; done

clean: ## remove the environment, the demo and everything built
	rm -rf $(VENV) $(OPENAI)/node_modules clients/*/node_modules clients/*/build .demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage htmlcov
	rm -f omni_grpc/_native*.so demo.png
	find omni_grpc models tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
