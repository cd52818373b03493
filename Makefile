# Each target does its own set-up. PYTHON is what .venv is made of.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup demo test test-fast lint bench gpu gpus clean

setup: $(STAMP)
	@:

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "autopar needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1); say which with: make setup PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
		{ echo "cannot create .venv: install the venv module of $(PYTHON) (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,hf]"
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py

# Bytecode is written, as the tests start many processes that would each compile the package again.
test: setup
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile

# No process groups, and nothing slow.
test-fast: setup
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile -m "not distributed and not slow"

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.benchmarks.bench

# A GPU machine may have no network: there the python3 that already has torch runs it from the checkout, with what else
# is missing from a folder of wheels (pip download --no-deps -d wheels NAME, on a machine that has a network).
# GPU="--only profile predictions" runs some of its steps. gpus: on several GPUs of one machine, over NCCL.
gpu gpus:
	@if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
		if ls wheels/*.whl >/dev/null 2>&1; then \
			$(PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target out/site wheels/*.whl; \
		fi; \
		PYTHONPATH=.:out/site $(PYTHON) -m tools.$@ --out out/$@ $(GPU); \
	else \
		$(MAKE) --no-print-directory setup && $(BIN)/python -m tools.$@ --out out/$@ $(GPU); \
	fi

clean:
	rm -rf .venv out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
