# make demo | test | test-long | lint | docs | clean. Everything is installed into .venv/, from nothing; a second run starts at once.
#
#   PYTHON=python3.12       the interpreter (3.11 or newer)
#   TORCH_INDEX=URL         where the CPU build of torch comes from, if pip's own index does not have it
#   ARGS="-k ledger -x"     arguments for pytest; what stands in front of `make`, such as MKL_CBWR=COMPATIBLE, whose
#                           sums round otherwise, holds for the tests
#   WORKERS=2               processes that share the tests (0: none, which lets pytest's debugger in)
#
# `make test` leaves out the tests marked `long`, which take too long for every change: a whole rehearsal of a GPU day, a
# sweep killed twenty times, soaks, compiles for every architecture, training, workers by Ray, which it installs. Of a
# table marked `covering` it leaves out the cases whose values all occur in others. `make test-long` runs those alone and
# takes the same ARGS: ARGS=--collect-only names them.

PYTHON ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=
WORKERS ?= 2

# Python may keep what it compiled, whatever is set outside: without, each of the processes that tests start compiles
# torch from its source again, which takes it longer than the test.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# Of 17000 files few are ever imported: those are compiled then.
INSTALL := $(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
TORCH := torch==$(shell sed -n 's/^torch==//p' constraints.txt)

# CUDA's packages (several GB) are installed only beside an NVIDIA GPU whose driver answers. Elsewhere torch goes first,
# as the build that does not depend on them: on Linux that is `+cpu`, the other systems have no CUDA build.
ifeq ($(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu),gpu)
CUDA := ,cuda
else ifeq ($(shell uname -s),Linux)
TORCH := $(TORCH)+cpu
OR_ELSE = 2>/dev/null || $(INSTALL) --index-url $(TORCH_INDEX) $(TORCH)
endif

.PHONY: demo test test-long lint docs clean

demo: .venv/.demo
	$(BIN)/python bench/demo.py

test: .venv/.dev
	$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

test-long: .venv/.long
	$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal -m long $(ARGS)
	$(BIN)/pytest -m alone $(ARGS)

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The site, in site/: a link that leads nowhere fails it.
docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf .venv build site dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than what it was installed from.
.venv/.demo: .venv/.torch pyproject.toml
	$(INSTALL) --editable '.[bench$(CUDA)]'
	touch $@

.venv/.dev: .venv/.torch pyproject.toml
	$(INSTALL) --editable '.[dev$(CUDA)]'
	touch $@

# Ray and what comes with it are half a gigabyte.
.venv/.long: .venv/.dev
	$(INSTALL) --editable '.[dev,ray$(CUDA)]'
	touch $@

.venv/.torch: $(BIN)/python constraints.txt
	$(INSTALL) $(TORCH) $(OR_ELSE)
	touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tiered needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
