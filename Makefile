# Two commands set a fresh machine up: `make demo` and `make test`. Each is complete on its own.
#
#   make demo                       the main job on a real stack, CPU
#   make demo CONNECTOR_EXTRA=gpu   the same with vllm and mooncake-transfer-engine; CUDA 13: gpu-cuda13
#   make test                       every test
#   make loop                       record a live engine, gate the recording, restart with `auto`
#   make faults                     the failure-injection suite alone
#   make simulate SEEDS=1000        so many random stories a mode over the simulated worker (docs/simulation.md)
#   make versions VERSIONS="0.31 0.33"   our tests and the simulation on other releases of vLLM (docs/compatibility.md)
#   make pythons PYTHONS="3.12 3.13"     what needs no vLLM, on other Pythons
#   make vllm-tests                 vLLM's own tests: the stock connector, then ours in its place
#   make bench                      A/B time to first token against stock, some 50 minutes; QUICK=1: 10
#   make bench-choice               load or compute, beside the bound, 30 minutes; QUICK=1: 7
#   make docs                       the docs site, in docs/_build/html
#   make docs-check                 the same, opened in Chromium (as root it installs Debian's)
#   make diagrams                   draw the docs' Mermaid diagrams anew, after a change (needs npm and Chromium)
#   make watch                      docs/operate/ against a real Prometheus and real servers; 4 minutes
#   make gpu-check                  on a GPU host: doctor, probe, demo, some faults, a short A/B, under 8 minutes
#   make gpu-check CONNECTOR_EXTRA=cpu PATIENCE=3   the same script where there is no GPU
#   make lint                       ruff, mypy, import-linter
#   make clean                      removes .venv and what the commands wrote

SHELL := /bin/bash
CONNECTOR_EXTRA ?= cpu
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_STAMP := $(VENV)/.installed-demo-$(CONNECTOR_EXTRA)
BENCH_STAMP := $(VENV)/.installed-bench-$(CONNECTOR_EXTRA)
TEST_STAMP := $(VENV)/.installed-test-$(CONNECTOR_EXTRA)
DOCS_STAMP := $(VENV)/.installed-docs

.PHONY: demo test test-simulator test-simulation test-connector test-lmcache test-ranks test-rest loop faults simulate versions pythons vllm-tests bench bench-choice watch gpu-check host-check docs docs-check diagrams lint clean
.DELETE_ON_ERROR:

demo: $(DEMO_STAMP)
	$(BIN)/singleflight demo --out demo-out

# Processes of their own: where numba is loaded, vLLM 0.32's CPU engine does not start (it scans all modules and trips over
# llvmlite), and engine tests run in the test process; the fault suite has an engine of its own, and so has LMCache, which
# brings numba. Two at a time, the longest first, since what takes long is engines that start, each on one core. Engines
# of two ranks come before, alone: beside other work on two cores Mooncake's Gets to two ranks now and then take over 5 s,
# and then fail (LEASE_EXPIRED).
test: $(TEST_STAMP) test-ranks
	@echo 'Two suites at a time; each prints what it has to say when it has ended, after some ten minutes.'
	@$(MAKE) --no-print-directory -j2 --output-sync=target --keep-going \
		test-connector faults test-simulator test-rest test-lmcache test-simulation FAULTS=--ignore=$(RANKS)

# What loads numba, or stands on traces or pages alone.
SIMULATOR := tests/sim tests/sweep tests/twin tests/files tests/traces tests/gate tests/terminal tests/cli/test_simulate.py tests/docs

test-simulator: $(TEST_STAMP)
	$(BIN)/python -m pytest $(SIMULATOR) $(PYTEST_ARGS)

test-connector: $(TEST_STAMP)
	$(BIN)/python -m pytest tests/connector $(PYTEST_ARGS)

# vLLM's real scheduler over simulated workers, some three minutes; no engine (docs/simulation.md).
test-simulation: $(TEST_STAMP)
	$(BIN)/python -m pytest tests/simulation $(PYTEST_ARGS)

# A real LMCache server, LMCache's connector alone and in ours; some three minutes.
test-lmcache: $(TEST_STAMP)
	$(BIN)/python -m pytest tests/lmcache $(PYTEST_ARGS)

OTHERS := tests/connector tests/faults tests/lmcache tests/simulation

test-rest: $(TEST_STAMP)
	$(BIN)/python -m pytest $(SIMULATOR:%=--ignore=%) $(OTHERS:%=--ignore=%) $(PYTEST_ARGS)

# Takes numba and matplotlib, so what the tests take.
loop: $(TEST_STAMP)
	$(BIN)/python -m singleflight.cli.loop --out loop-out

faults: $(TEST_STAMP)
	$(BIN)/python -m pytest tests/faults $(FAULTS) $(PYTEST_ARGS)

RANKS := tests/faults/test_connectors_and_ranks.py

test-ranks: $(TEST_STAMP)
	$(BIN)/python -m pytest $(RANKS) $(PYTEST_ARGS)

# Interruptible. SIMULATE_ARGS: see `python -m tests.simulation --help`.
simulate: $(TEST_STAMP)
	PYTHONHASHSEED=0 $(BIN)/python -m tests.simulation --seeds $(or $(SEEDS),1000) $(SIMULATE_ARGS)

# Each downloads into .venvs/, can be interrupted, and takes its module's options: `python -m tests.versions --help`,
# `tests.versions.pythons`, `tests.versions.own`.
versions: $(TEST_STAMP)
	$(BIN)/python -m tests.versions $(VERSIONS) $(VERSIONS_ARGS)

pythons: $(TEST_STAMP)
	$(BIN)/python -m tests.versions.pythons $(PYTHONS)

vllm-tests: $(TEST_STAMP)
	$(BIN)/python -m tests.versions.own --out bench/results/vllm-tests.json $(VLLM_TESTS)

# The hash seed makes the client's prompts the same in every run. BENCH_ARGS: see `python -m bench.ab --help`.
bench: $(BENCH_STAMP)
	PYTHONHASHSEED=0 $(BIN)/python -m bench.ab $(if $(QUICK),--quick) $(BENCH_ARGS)

bench-choice: $(BENCH_STAMP)
	PYTHONHASHSEED=0 $(BIN)/python -m bench.choice $(PARTS) $(if $(QUICK),--quick) $(BENCH_ARGS)

# Nothing is fetched; a warning is an error.
docs: $(DOCS_STAMP)
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -b html docs docs/_build/html
	@echo 'Written: docs/_build/html/index.html'

docs-check: $(TEST_STAMP)
	.ci/chromium
	REQUIRE_CHROMIUM=1 DOCS_SCREENSHOTS=docs/_build/screenshots \
	$(BIN)/python -m pytest tests/docs $(PYTEST_ARGS)

diagrams: $(TEST_STAMP)
	.ci/chromium
	$(BIN)/python docs/_ext/draw_diagrams.py

# Dashboard and alerts; writes docs/img/watch.png. WATCH_ARGS: see `python -m bench.watch --help`.
watch: $(BENCH_STAMP)
	.ci/prometheus $(VENV)
	$(BIN)/python -m bench.watch $(WATCH_ARGS)
# With the GPU's wheels, unless CONNECTOR_EXTRA is given.
gpu-check: PATIENCE ?= 1
ifeq ($(origin CONNECTOR_EXTRA),file)
gpu-check: CONNECTOR_EXTRA := gpu
endif
gpu-check:
	@$(MAKE) --no-print-directory host-check CONNECTOR_EXTRA=$(CONNECTOR_EXTRA) PATIENCE=$(PATIENCE)

host-check: $(TEST_STAMP)
	$(BIN)/python -m bench.gpu_check --out gpu-check-out --patience $(PATIENCE)

lint: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(DEMO_STAMP): pyproject.toml .ci/setup
	.ci/setup $(VENV) '$(CONNECTOR_EXTRA),plot'
	@touch $@

$(BENCH_STAMP): pyproject.toml .ci/setup
	.ci/setup $(VENV) '$(CONNECTOR_EXTRA),bench'
	@touch $@

$(DOCS_STAMP): pyproject.toml .ci/setup
	.ci/setup $(VENV) docs
	@touch $@

# Without promtool the tests of the alerts are skipped, and say so.
$(TEST_STAMP): pyproject.toml .ci/setup .ci/prometheus
	.ci/setup $(VENV) '$(CONNECTOR_EXTRA),all,lmcache,test,lint'
	-.ci/prometheus $(VENV)
	@touch $@ $(DEMO_STAMP) $(BENCH_STAMP) $(DOCS_STAMP)

clean:
	rm -rf $(VENV) demo-out loop-out gpu-check-out docs/_build
