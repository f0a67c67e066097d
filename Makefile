# Every target sets up what it needs: a virtual environment in .venv with pinned versions.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check

.PHONY: demo test test-browser lint format docs clean

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt -e ".[dev]"
	touch $@

demo: $(VENV)/.installed  ## describe a picture with and without ReVisiT, on a model that needs no download
	$(BIN)/python -m revisit demo

test: $(VENV)/.installed lint  ## lint, types and the whole test suite
	$(BIN)/python -m pytest -n 2

test-browser: $(VENV)/.installed  ## the pages in a real browser; needs a Chromium
	@$(BIN)/python tests/chromium.py
	$(BIN)/python -m pytest -m browser

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.installed  ## build the site into site/
	$(PIP) install -q -c constraints.txt -e ".[docs]"
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache
