# make test   creates .venv, installs carlreg with what its tests need, and runs them
# make demo   in the same environment, registers two synthetic patients and says how well it went
# make docs   the documentation as a website in site/, every link checked
# make lint   ruff and mypy, in the same environment
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

.PHONY: test demo docs lint format clean

test: $(READY)
	$(VENV)/bin/python -m pytest $(ARGS)

demo: $(READY)
	$(VENV)/bin/carl demo --overwrite $(ARGS)

docs: $(VENV)/.docs
	$(VENV)/bin/python docs/build.py

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/.docs: $(READY)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist site .cache .mypy_cache .pytest_cache .ruff_cache
