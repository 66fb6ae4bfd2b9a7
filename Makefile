# One command each; see README.md. `make demo` and `make test` work from a clean clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Whichever build of it pip finds first: name another to choose, e.g. make TORCH="torch==2.13.0+cpu" ...
TORCH ?= torch==2.13.0

# torch's threads spin while they wait, unless told otherwise before it is loaded; measured at 5.7 times slower.
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 0

.PHONY: demo test check lint types quick slow model install bench browser clients clean

demo: install
	$(BIN)/python -m nextstate.recipes.demo

test: install lint types browser
	$(BIN)/python -m nextstate.cli.main model fetch
	$(BIN)/python -m pytest -m "not clients"

check: install lint types quick

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

quick: install
	$(BIN)/python -m pytest -m "not slow"

model: install
	$(BIN)/python -m nextstate.cli.main model fetch

# For the tests of the page. A browser that is installed will do; else one is fetched into the user's cache folder, or, by
# root on Debian, as a package. Where none can be had, those tests are skipped and say so.
browser: install
	@$(BIN)/python -m tests.serve.browser || timeout 180 $(BIN)/playwright install chromium-headless-shell || \
	  { test "$$(id -u)" = 0 && timeout 60 apt-get update -qq && timeout 180 apt-get install -qq -y --no-install-recommends chromium-headless-shell; } || \
	  echo "no browser: the tests of the page will be skipped"

# Needs npm and its registry, besides pip's; what it fetches stays in the user's cache folder.
clients: install
	$(BIN)/python -m tests.clients.installed
	$(BIN)/python -m pytest -m clients tests/clients

bench: model
	$(BIN)/python -m benchmarks.serving
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.tree
	$(BIN)/python -m benchmarks.latency
	$(BIN)/python -m benchmarks.page

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt "$(TORCH)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
