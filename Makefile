# Without the checkout on sys.path: a bare `kernels` or `store` there hides packages of the same name.
export PYTHONSAFEPATH = 1
export RAGKV_HOME ?= $(CURDIR)/.ragkv

# Test processes side by side, a module to each: those that start an engine share the cores out.
WORKERS ?= 2
PYTEST = .venv/bin/pytest -q -n $(WORKERS) --dist loadscope --no-loadscope-reorder
QUESTION ?= What does a language model do before it writes the first word?

# A better model for the demo: a folder or a Hugging Face id. It gets a home of its own.
MODEL ?=
OWN_HOME = RAGKV_MODEL__NAME="$(MODEL)" RAGKV_HOME="$(RAGKV_HOME)/demo-$(notdir $(MODEL:/=))" \
	RAGKV_INDEX__EMBEDDER="$(RAGKV_HOME)/models/all-minilm-l6-v2"
DEMO = $(if $(MODEL),$(OWN_HOME)) .venv/bin/ragkv

.DEFAULT_GOAL := help
.PHONY: help setup models demo docs lint check test test-long clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

setup:  ## Make .venv with everything pinned (at once if nothing changed)
	@./setup.sh

models: setup  ## Download and convert the embedded models
	.venv/bin/ragkv models fetch

demo: models  ## Index this project's documents and ask a question, with and without reuse of KV
	$(DEMO) index README.md docs/architecture.md docs/configuration.md docs/measuring.md docs/policies.md
	$(DEMO) ask "$(QUESTION)" --compare
	@$(if $(MODEL),,echo "The embedded model has 135 million parameters and writes accordingly: make demo MODEL=… takes a better one.")

docs: setup  ## Rewrite the table of settings in docs/configuration.md
	.venv/bin/python docs/settings.py

lint: setup  ## Format, lint, dependencies and types
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/deptry .
	.venv/bin/deptry ragkv kernels store retriever --optional-dependencies-dev-groups dev,eval
	.venv/bin/mypy

check: lint  ## The same, and the fast tests
	$(PYTEST) -m "not engine"

test: models  ## Every test but the long ones, also those that start a real vLLM engine
	$(PYTEST) -m "not long"

test-long: models  ## What takes minutes each: commands that are stopped and killed, two servers behind one address
	$(PYTEST) -m long

clean:  ## Remove .venv, caches and build outputs (keeps models and KV in .ragkv)
	rm -rf .venv build dist *.egg-info .ruff_cache .mypy_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
