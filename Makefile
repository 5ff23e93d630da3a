# `make demo`, `make test` and `make wheel` do all set-up themselves on a machine with Python 3.10 or later.
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: demo test wheel clean

demo: $(STAMP)
	$(VENV)/bin/python -m qla.demo

# The last line of the run says how many tests need a GPU and were not run.
test: $(STAMP)
	$(VENV)/bin/python -m pytest -n $(WORKERS)

# A wheel in dist/ that carries every kernel, built for sm_90a; needs nvcc and no GPU. Made from a copy, so that the kernels get into no other
# installation from this tree.
wheel: $(STAMP)
	rm -rf build/wheel
	mkdir -p build/wheel
	cp -R pyproject.toml setup.py README.md LICENSE qla build/wheel/
	$(VENV)/bin/python -m qla.aot --pack build/wheel/qla/kernels/compiled
	$(VENV)/bin/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist build/wheel

# Installed in place, so only a change of the metadata or of the pinned versions installs again.
$(STAMP): pyproject.toml setup.py constraints-dev.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints-dev.txt --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist qla.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
