# make demo   set up, then train three networks on embedded data and show them side by side
# make test   set up, then lint, type-check and run every test (CPU only), the core's first
# make core   the core's tests alone, in about a minute
# make fuzz     damage a million checkpoints, states and configs, and a million files more as coverage leads: over an hour
# make torture  kill runs 200 times, mutate a million data files, train 100,000 steps: about half an hour
# make audit    compare the pinned versions with the known holes; needs the network
# make docs   build the documentation's site into site/
# make dist   build wheel and sdist, check them, and train with the wheel in an empty environment

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TIERS := $(wildcard tests/kernels tests/distributed tests/lab tests/export tests/integrations tests/examples tests/fuzz)

.PHONY: demo test core lint torture fuzz audit docs dist clean

# The demo needs little; tests, site and packages need every trainer and format.
$(VENV)/.lab: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[lab]'
	@touch $@

$(VENV)/.installed: $(VENV)/.lab
	$(BIN)/pip install -q -c constraints.txt -e '.[all]'
	@touch $@

demo: $(VENV)/.lab
	$(BIN)/gft demo

lint: $(VENV)/.installed
	$(BIN)/ruff check gft tests examples docs
	$(BIN)/pyright

core: $(VENV)/.installed
	$(BIN)/pytest -n 2 tests/core

test: lint core
	$(BIN)/pytest -n 2 $(TIERS)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 tests/forked

fuzz: $(VENV)/.installed
	$(BIN)/python tests/fuzz/fuzz.py --inputs 1000000
ifeq ($(shell uname -sm),Linux x86_64)
	$(BIN)/pip install -q --only-binary :all: atheris==3.0.0
	$(BIN)/python tests/fuzz/guided.py --inputs 1400000
else
	@echo "Inputs that follow coverage are left out: atheris has wheels for Linux on x86-64 alone."
endif

torture: $(VENV)/.installed
	$(BIN)/python tests/torture.py kills --kills 200
	$(BIN)/python tests/fuzz/data_files.py --inputs 1000000
	$(BIN)/python tests/torture.py long --steps 100000

# Strict: a package that could not be looked up is a failure, not a line to overlook.
audit: $(VENV)/.lab
	$(BIN)/pip install -q pip-audit
	$(BIN)/pip-audit --strict -r constraints.txt --no-deps --disable-pip

docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(VENV)/.installed
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/pytest tests/dist

clean:
	rm -rf $(VENV) runs dist site .pytest_cache .ruff_cache .hypothesis
