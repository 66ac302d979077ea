# Everything is set up on first use below .venv/, from hash-pinned requirements; only Python >= 3.11,
# pip and make are needed. Another interpreter: `make test PYTHON=python3.13`. Arguments for the tool
# behind a target: `make test ARGS="-k sweep"`. `make demo DB=postgres` shows it on PostgreSQL.

PYTHON ?= python3
ARGS ?=
DB ?= sqlite

# Environments are kept apart by Python version, so that changing PYTHON never mixes two.
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
VENVS := .venv/$(VERSION)
PIP_INSTALL := -m pip --disable-pip-version-check install --quiet --no-input --require-virtualenv

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: test
test: $(VENVS)/test/.installed ## Run the tests with the newest pinned dependencies
	$(VENVS)/test/bin/python -m pytest $(ARGS)

.PHONY: test-lowest
test-lowest: $(VENVS)/lowest/.installed ## Run the tests with the lowest dependencies that pyproject.toml allows
	UNSTUCK_TEST_POSTGRES=18 $(VENVS)/lowest/bin/python -m pytest $(ARGS)

.PHONY: test-matrix
test-matrix: ## Run the tests on every supported Python that this machine has
	@set -e; pythons="$$($(PYTHON) tools/pythons.py)"; \
	for python in $$pythons; do echo "== $$python"; $(MAKE) test PYTHON="$$python"; done; \
	echo "Passed on:"; printf '  %s\n' $$pythons

.PHONY: check
check: $(VENVS)/check/.installed ## Lint, check the format, the types and the direction of imports
	$(VENVS)/check/bin/ruff check .
	$(VENVS)/check/bin/ruff format --check .
	$(VENVS)/check/bin/mypy
	$(VENVS)/check/bin/lint-imports

.PHONY: format
format: $(VENVS)/check/.installed ## Fix what ruff can fix, and format
	$(VENVS)/check/bin/ruff check --fix-only .
	$(VENVS)/check/bin/ruff format .

.PHONY: demo
demo: $(VENVS)/demo/.installed ## Kill, starve, redeploy and freeze workers, and see every record come back
	$(VENVS)/demo/bin/python -m examples.demo --database $(DB) $(ARGS)

.PHONY: clean
clean: ## Remove the environments and everything that was built
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find src tests tools examples -name __pycache__ -type d -prune -exec rm -rf {} +

COMPILE = $(VENVS)/pins/bin/uv pip compile --quiet --no-config --universal --python-version 3.11 \
	--no-header --no-emit-index-url --no-emit-find-links $(ARGS)
PINNED = $(COMPILE) --generate-hashes

# In lowest.txt only the dependencies of unstuck itself are low: the test tools go in as test.txt has them.
.PHONY: pins
pins: $(VENVS)/pins/.installed ## Pin requirements/*.in again (ARGS=--upgrade to move to newer versions)
	$(PINNED) requirements/pins.in --output-file requirements/pins.txt
	$(PINNED) pyproject.toml requirements/test.in --output-file requirements/test.txt
	$(PINNED) pyproject.toml requirements/check.in --constraint requirements/test.txt \
		--output-file requirements/check.txt
	$(PINNED) pyproject.toml requirements/demo.in --constraint requirements/test.txt \
		--output-file requirements/demo.txt
	$(COMPILE) --no-deps --no-annotate requirements/test.in --constraint requirements/test.txt \
		--output-file .venv/tools.in
	$(PINNED) --resolution lowest-direct pyproject.toml .venv/tools.in \
		--output-file requirements/lowest.txt

.PHONY: python
python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "unstuck needs Python 3.11 or newer; '$(PYTHON)' is not. Name another: make PYTHON=python3.12 ..." >&2; \
		exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "'$(PYTHON)' cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; \
		exit 1; }

# The stamp is older than a changed pin or pyproject.toml, so that either installs afresh.
$(VENVS)/%/.installed: requirements/%.txt pyproject.toml | python
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python $(PIP_INSTALL) --require-hashes -r $<
	$(@D)/bin/python $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENVS)/pins/.installed: requirements/pins.txt | python
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python $(PIP_INSTALL) --require-hashes -r $<
	@touch $@
