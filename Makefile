# Two commands set a fresh machine up: `make demo` and `make test`. Each is complete on its own.
#
#   make demo                       the main job on a real stack, CPU
#   make demo CONNECTOR_EXTRA=gpu   the same with vllm and mooncake-transfer-engine
#   make test                       every test
#   make loop                       record a live engine, gate the recording, restart with `auto`
#   make faults                     the failure-injection suite alone
#   make bench                      A/B time to first token against stock, some 50 minutes; QUICK=1: 10
#   make lint                       ruff, mypy, import-linter
#   make clean                      removes .venv and what the commands wrote

SHELL := /bin/bash
CONNECTOR_EXTRA ?= cpu
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_STAMP := $(VENV)/.installed-demo-$(CONNECTOR_EXTRA)
BENCH_STAMP := $(VENV)/.installed-bench-$(CONNECTOR_EXTRA)
TEST_STAMP := $(VENV)/.installed-test-$(CONNECTOR_EXTRA)

.PHONY: demo test test-simulator test-connector loop faults bench lint clean
.DELETE_ON_ERROR:

demo: $(DEMO_STAMP)
	$(BIN)/singleflight demo --out demo-out

# Three processes: where numba is loaded, vLLM 0.32's CPU engine does not start (it scans all modules and trips over
# llvmlite), and engine tests run in the test process; the fault suite has an engine of its own. The latter two run
# at the same time, since what takes long is engines that start, each on one core.
test: $(TEST_STAMP) test-simulator
	@echo 'Now two suites at a time; each prints what it has to say when it has ended, after some ten minutes.'
	@$(MAKE) --no-print-directory -j2 --output-sync=target --keep-going faults test-connector

test-simulator: $(TEST_STAMP)
	$(BIN)/python -m pytest tests/sim tests/traces tests/gate $(PYTEST_ARGS)

test-connector: $(TEST_STAMP)
	$(BIN)/python -m pytest --ignore=tests/sim --ignore=tests/traces --ignore=tests/gate --ignore=tests/faults $(PYTEST_ARGS)

# Takes numba and matplotlib, so what the tests take.
loop: $(TEST_STAMP)
	$(BIN)/python -m singleflight.loop --out loop-out

faults: $(TEST_STAMP)
	$(BIN)/python -m pytest tests/faults $(PYTEST_ARGS)

# The hash seed makes the client's prompts the same in every run. BENCH_ARGS: see `python -m bench.ab --help`.
bench: $(BENCH_STAMP)
	PYTHONHASHSEED=0 $(BIN)/python -m bench.ab $(if $(QUICK),--quick) $(BENCH_ARGS)

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

$(TEST_STAMP): pyproject.toml .ci/setup
	.ci/setup $(VENV) '$(CONNECTOR_EXTRA),all,test,lint'
	@touch $@ $(DEMO_STAMP) $(BENCH_STAMP)

clean:
	rm -rf $(VENV) demo-out loop-out
