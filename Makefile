# Needs python3 (3.11 to 3.13) and make. PYTHON= chooses another interpreter; the .venv is then made anew with it.

PYTHON ?= python3
VENV := .venv
TEST_WORKERS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
# What an installation depends on; the package's __init__.py states the version.
MANIFESTS := pyproject.toml constraints.txt core/trivet/__init__.py
# Newer versions of pip read the second variable for what building the project takes, older ones the first.
PIP_INSTALL := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
	$(BIN)/python -m pip install --quiet

# Which interpreter the .venv is of: the one that PYTHON names; where it names none, the one that is there.
# The stamps carry it, so that another interpreter finds nothing installed.
TAG_OF = $(shell $(1) -c 'import sys; print(sys.implementation.cache_tag)' 2>/dev/null)
ifeq ($(origin PYTHON),file)
TAG := $(or $(call TAG_OF,$(BIN)/python),$(call TAG_OF,$(PYTHON)))
else
TAG := $(call TAG_OF,$(PYTHON))
endif
INSTALLED := $(VENV)/.installed-$(TAG)

.PHONY: demo test lint mutants clean venv

demo: $(INSTALLED)
	$(BIN)/trivet generate --stats "Once upon a time"

# One thread for each worker: the workers are the parallelism.
test: $(INSTALLED)-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: $(INSTALLED)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Another folder's patches instead of the project's own: MUTANTS=DIR.
MUTANTS ?= tests/mutants/patches
mutants: $(INSTALLED)
	@$(BIN)/python -m tests.mutants.run $(MUTANTS) --workers $(TEST_WORKERS)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# Each stamp says that an installation stands; changing what it depends on makes it anew.
$(INSTALLED): $(MANIFESTS) | venv
	@echo "installing Trivet into $(VENV)"
	@$(PIP_INSTALL) --editable .
	@touch $@

$(INSTALLED)-test: $(MANIFESTS) | venv
	@echo "installing Trivet and its test extra into $(VENV)"
	@$(PIP_INSTALL) --editable '.[test]'
	@touch $@ $(INSTALLED)

$(INSTALLED)-dev: $(MANIFESTS) | venv
	@echo "installing Trivet and its dev extra into $(VENV)"
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@ $(INSTALLED)

define CHECK_PYTHON
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit("Trivet needs Python 3.11 to 3.13, and $(PYTHON) is %d.%d: choose another with PYTHON=" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError:
    sys.exit("$(PYTHON) cannot make virtual environments: Debian and Ubuntu ship that part apart (apt install python3-venv); or choose another interpreter with PYTHON=")
endef
export CHECK_PYTHON

# Keeps a .venv of the wanted interpreter.
venv:
	@if [ -n "$(TAG)" ] && [ "$(call TAG_OF,$(BIN)/python)" = "$(TAG)" ] && [ -x $(BIN)/pip ]; then exit 0; fi; \
	command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON): choose an interpreter with PYTHON=" >&2; exit 1; }; \
	$(PYTHON) -c "$$CHECK_PYTHON" || exit 1; \
	echo "making $(VENV) with $(PYTHON)"; \
	$(PYTHON) -m venv --clear $(VENV)
