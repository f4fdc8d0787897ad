# make demo   set up, then train three networks on embedded data and show them side by side
# make test   set up, then lint, type-check and run every test (CPU only), the core's first
# make core   the core's tests alone, in under a minute

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test core lint clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[lab,energy,solvers,dev]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/gft demo

lint: $(VENV)/.installed
	$(BIN)/ruff check gft tests
	$(BIN)/pyright

core: $(VENV)/.installed
	$(BIN)/pytest -n 2 tests/core

test: lint core
	$(BIN)/pytest -n 2 tests/kernels tests/distributed tests/lab

clean:
	rm -rf $(VENV) runs .pytest_cache .ruff_cache .hypothesis
