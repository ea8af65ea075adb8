# `make demo` and `make test` set up all they need. ARGS is passed on: make test ARGS="-k demo -x"
PYTHON := python3
VENV := .venv/bin
TYPES := .build/typecheck
ARGS :=

.PHONY: setup environments engines demo test lint screenshots

setup:
	@$(PYTHON) scripts/setup.py --system

environments:
	@$(PYTHON) scripts/setup.py

# Every other vLLM that is supported, laid over .venv.
engines: environments
	@$(PYTHON) scripts/engines.py

# What a vLLM release changes for kvlens: make compat VLLM=0.35.0
VLLM :=
.PHONY: compat
compat: environments engines
	@$(PYTHON) scripts/compat_release.py $(VLLM)

demo: environments
	@$(VENV)/kvlens demo $(ARGS)

# The connector's tests run on every vLLM that is supported: its corrections differ with it.
test: setup engines lint
	@failed=0; \
	$(PYTHON) scripts/engines.py --test $(ARGS) || failed=1; \
	$(VENV)/python -m pytest $(ARGS) || failed=1; \
	exit $$failed

# mypy and import-linter do not follow an editable install's import hook: show them the packages
# under their names.
lint: environments
	@$(VENV)/ruff check
	@$(VENV)/ruff format --check
	@mkdir -p $(TYPES)/kvlens
	@for package in connector telemetry dashboard; do \
		ln -sfn ../../../$$package $(TYPES)/kvlens/$$package; \
	done
	@MYPYPATH=$(TYPES) $(VENV)/mypy
	@PYTHONPATH=$(TYPES) $(VENV)/lint-imports --no-cache

# Every page of the dashboard, both themes and widths, to docs/screenshots.
screenshots: setup
	@$(VENV)/python scripts/screenshots.py $(ARGS)

# Random lookups against the oracle, on every engine that is laid out here.
EXAMPLES := 50000
.PHONY: fuzz
fuzz: environments
	@$(VENV)/python benchmarks/fuzz_lookup.py --examples $(EXAMPLES) $(ARGS)

# What kvlens costs, stock against kvlens in one run; docs/performance.md says how.
.PHONY: bench
bench: environments
	@$(VENV)/python benchmarks/run.py $(ARGS)

# What the dashboard costs, over RECORDS requests, beside Arize Phoenix; docs/performance-dashboard.md.
RECORDS := 1000000
.PHONY: bench-dashboard
bench-dashboard: environments
	@$(VENV)/python benchmarks/dashboard.py --records $(RECORDS) $(ARGS)

# 200 random conversations with each kind of model: reloaded KV against recomputed (docs/canary.md).
CONVERSATIONS := 200
.PHONY: canary acceptance
canary: environments
	@$(VENV)/python benchmarks/canary.py --conversations $(CONVERSATIONS) $(ARGS)

# What share of a drafter's guesses is accepted when its KV is reloaded.
acceptance: environments
	@$(VENV)/python benchmarks/draft_acceptance.py $(ARGS)
