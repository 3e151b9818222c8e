# Two commands need nothing but Python 3.11 and make: `make demo` and `make test`.
VENV ?= .venv
PEERS_VENV ?= .venv-peers
VLLM_VENV ?= .venv-vllm
REAL_MODELS ?= .real-models
RAY_VENV ?= $(VENV)-ray
SITE_VENV ?= .venv-site
PY = $(VENV)/bin/python
PYTEST = $(PY) -m pytest
WORKERS ?= 2
HERE = not real and not vllm and not ray and not peers and not ranks and not faults and not fuzz and not paper
export TOKENIZERS_PARALLELISM = false

.PHONY: help demo docs docs-site claims forecasts real reasoning test coverage test-real test-vllm test-peers test-ray test-ranks test-faults test-fuzz test-paper check format lint bench install dev clean

help:            ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 16

demo: install    ## the whole method on a tiny world, in minutes
	$(VENV)/bin/lweave demo

test: dev        ## every test that needs no extra environment
	OMP_NUM_THREADS=1 $(PYTEST) -n $(WORKERS) --dist loadfile --durations=15 -m "$(HERE)" tests

coverage: dev    ## the same, and which lines of the package they run
	OMP_NUM_THREADS=1 $(PYTEST) -n $(WORKERS) -m "$(HERE)" --cov --cov-report=term tests

test-real: dev   ## a real checkpoint end to end; fetches 100 MB the first time
	@scripts/real-models "$(PY)" "$(REAL_MODELS)"
	LWEAVE_REAL_MODELS="$(abspath $(REAL_MODELS))" $(PYTEST) -s -m real tests

test-vllm: dev   ## the vLLM engine, in a separate environment
	@scripts/vllm-env "$(VLLM_VENV)"
	@scripts/real-models "$(PY)" "$(REAL_MODELS)"
	LWEAVE_VLLM_PYTHON="$(abspath $(VLLM_VENV))/bin/python" VLLM_CPU_KVCACHE_SPACE=1 \
	LWEAVE_SMOLLM2="$(abspath $(REAL_MODELS))/smollm2" $(PYTEST) -s -m vllm tests

test-peers:      ## against other libraries, in a separate environment
	@scripts/peers-env "$(PEERS_VENV)"
	OMP_NUM_THREADS=1 $(PEERS_VENV)/bin/python -m pytest -m peers tests

test-ray: dev    ## whole runs on a Ray cluster of two nodes, one killed in each phase
	@scripts/ray-env "$(VENV)" "$(RAY_VENV)"
	OMP_NUM_THREADS=1 $(RAY_VENV)/bin/python -m pytest -m ray tests

test-ranks: dev  ## several processes train, sample and run engines with the results of one
	OMP_NUM_THREADS=1 $(PYTEST) -q -m ranks tests

test-faults: dev ## kills, full disks, flipped bytes and changed recipes
	OMP_NUM_THREADS=1 $(PYTEST) -q -n $(WORKERS) -m faults tests/faults

test-fuzz: dev   ## generated damage of recipes, data, checkpoints, run directories and answers to graders
	OMP_NUM_THREADS=1 $(PYTEST) -q -n $(WORKERS) -m fuzz tests

test-paper: dev  ## every command of docs/paper.md in rehearsal, with the paper's tables and figures
	OMP_NUM_THREADS=1 $(PYTEST) -q -m paper tests/paper

check: dev lint  ## format, lint, types and the fast tests
	OMP_NUM_THREADS=1 $(PYTEST) -q -n $(WORKERS) --dist loadfile -m "not slow and $(HERE)" tests

lint: dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: dev      ## rewrite the sources in the project's format
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

bench: dev       ## speed, as ratios measured side by side
	for script in benchmarks/*.py; do $(PY) $$script || exit 1; done

docs: install    ## run the demo and its five-point sweep, and put table and figure into README and docs
	$(VENV)/bin/lweave demo
	$(VENV)/bin/lweave sweep recipes/demo.toml --shares 0.25,0.375,0.5,0.625,0.75
	$(VENV)/bin/lweave report recipes/demo.toml
	$(PY) scripts/demo-docs runs/demo

docs-site:       ## the pages of docs/ as a site with search, in build/site; broken links are errors
	@scripts/site-env "$(SITE_VENV)"
	NO_MKDOCS_2_WARNING=1 $(SITE_VENV)/bin/mkdocs build --strict --quiet

claims: install  ## every baseline on three worlds with three seeds each (six hours of one core), into docs/appendix/claims.md
	$(PY) scripts/claims full --seeds 3 --world 101 --world 202 --set machine.threads=1 --docs
	$(PY) scripts/claims refresh --seeds 3 --world 101 --world 202 --set machine.threads=1 --docs

forecasts: install  ## forecasts: simulated, and against trained students (three hours of one core), into docs/appendix/forecast.md
	$(PY) scripts/forecast-docs simulated --repetitions 160 --docs
	$(PY) scripts/forecast-docs trained --seeds 3 --world 101 --world 202 --set machine.threads=1 --docs

real: dev        ## brevity and correctness on SmolLM2-135M (hours of two cores; resumes), into docs/appendix/real-models.md
	@scripts/real-models "$(PY)" "$(REAL_MODELS)"
	@scripts/real-gemma "$(PY)" "$(REAL_MODELS)"
	scripts/real/run "$(PY)" "$(abspath $(REAL_MODELS))/smollm2" "$(abspath $(REAL_MODELS))/gemma"

reasoning: dev   ## the second part of `real`: problems of several steps, on Qwen2.5-Coder-1.5B (resumes)
	@scripts/real-qwen "$(PY)" "$(REAL_MODELS)"
	scripts/real/reasoning "$(PY)" "$(abspath $(REAL_MODELS))/qwen"

install:
	@scripts/bootstrap "$(VENV)"

dev:
	@scripts/bootstrap "$(VENV)" dev
	@scripts/install-sandbox

clean:           ## remove the environment and caches (runs/ stays)
	rm -rf .venv .venv-* .real-models build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
