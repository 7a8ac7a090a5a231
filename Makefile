# make test     create .venv, install carlreg with what its tests need, and run them
# make demo     register two synthetic patients in the same environment and report how well it went
# make figures  rebuild every table and plot of the pages from the result files
# make docs     build the documentation as a website in site/ and check every link
# make torture  attack everything that reads or writes a file, for 20 minutes; every case with FULL=1
# make lint     ruff and mypy
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

.PHONY: test demo figures torture docs lint format clean

test: $(READY)
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

demo: $(READY)
	$(VENV)/bin/carl demo --overwrite $(ARGS)

figures: $(READY)
	$(VENV)/bin/python experiments/figures.py

torture: $(READY)
	$(VENV)/bin/python tests/torture/run.py $(if $(FULL),--full,) $(ARGS)

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
