# `make demo` and `make test` set up all they need. ARGS is passed on: make test ARGS="-k demo -x"
PYTHON := python3
VENV := .venv/bin
AFFECTED := .venv-affected/bin
TYPES := .build/typecheck
ARGS :=

.PHONY: setup environments demo test lint screenshots

setup:
	@$(PYTHON) scripts/setup.py --system

environments:
	@$(PYTHON) scripts/setup.py

demo: environments
	@$(VENV)/kvlens demo $(ARGS)

# The connector's tests run on the affected engine too: its corrections are only needed there.
test: setup lint
	@failed=0; \
	$(AFFECTED)/python -m pytest --connector-only $(ARGS) || [ $$? -eq 5 ] || failed=1; \
	$(VENV)/python -m pytest $(ARGS) || failed=1; \
	exit $$failed

# mypy does not follow an editable install's import hook: show it the packages under their names.
lint: environments
	@$(VENV)/ruff check
	@$(VENV)/ruff format --check
	@mkdir -p $(TYPES)/kvlens
	@for package in connector telemetry dashboard; do \
		ln -sfn ../../../$$package $(TYPES)/kvlens/$$package; \
	done
	@MYPYPATH=$(TYPES) $(VENV)/mypy

# Every page of the dashboard, both themes and widths, to docs/screenshots.
screenshots: setup
	@$(VENV)/python scripts/screenshots.py $(ARGS)
