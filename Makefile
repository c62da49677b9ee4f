# Every target that runs something first brings .venv up to date with requirements.lock and pyproject.toml
# (tools/environment.py): a minute or more the first time, a fraction of a second and no network after that.

# The Python that makes .venv, 3.11 or newer: make test PYTHON=/path/to/python3.12
PYTHON ?= $(shell for p in python3.11 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

# Two ranks share the cores of this machine: one thread each keeps them from fighting over these.
# DeepSpeed's compiled operators need the environment's own ninja on the PATH.
RUN := OMP_NUM_THREADS=1 PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python

TYPED := lightning_shard cli examples benchmarks tools

.DEFAULT_GOAL := help
.PHONY: help demo test test-full lint bench test-nvme lock clean venv cxx libaio

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r target text; do \
		printf '%-18s %s\n' "$$target" "$$text"; done

demo: venv ## Train a byte-level GPT on 2 CPU ranks under zero3_offload, beside one process
	@$(RUN) examples/byte_gpt.py

test: venv ## Run all tests but those that need the NVMe operator
	@$(RUN) -m pytest

test-full: venv ## Train every model under every pipeline schedule, and write docs/pipeline_matrix.md
	@$(RUN) -m pytest -m full --timeout=900

lint: venv ## Check style, formatting and types
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy $(TYPED)

bench: venv ## Compare Trainer steps with bare loops of the engines
	@$(RUN) benchmarks/zero.py
	@$(RUN) benchmarks/fsdp.py
	@$(RUN) benchmarks/pipeline.py
	@$(RUN) benchmarks/checkpoint.py
	@$(RUN) benchmarks/checkpoint_matrix.py --write docs/checkpoint_matrix.md

test-nvme: cxx libaio venv ## Run the NVMe tests; their operator compiles for minutes the first time
	@$(RUN) -m pytest -m nvme --timeout=3000

lock: venv ## Write requirements.lock anew from the ranges in pyproject.toml
	@$(RUN) tools/lock.py

clean: ## Remove .venv and all that tools have left in the checkout
	@rm -rf .venv build .mypy_cache .pytest_cache .ruff_cache *.egg-info lightning_logs nvme_swap
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv:
	@python="$(PYTHON)"; "$${python:-false}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "make: no Python 3.11 or newer found$${python:+ ($$python is none)}: install one, or name it with" \
			"PYTHON=/path/to/python3.11" >&2; exit 1; }; "$$python" tools/environment.py

cxx:
	@command -v "$${CXX:-c++}" >/dev/null || { \
		echo "make: no C++ compiler ($${CXX:-c++}) found: install one (Debian: apt install g++), or name it with" \
			"CXX=/path/to/g++" >&2; exit 1; }

libaio: cxx
	@echo '#include <libaio.h>' | "$${CXX:-c++}" -E -x c++ - >/dev/null 2>&1 || { \
		echo "make: libaio.h not found: install libaio's headers (Debian: apt install libaio-dev)" >&2; exit 1; }
