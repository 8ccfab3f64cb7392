# make demo: install and run the whole pipeline on this machine's CPU.   make test: lint, types, contracts, tests.
# make bench-data: the figures of reading, gates, tokenization and shards.
PYTHON ?= python3
BIN := .venv/bin
RUNTIME := .venv/.installed-demo
DEV := .venv/.installed-dev

.PHONY: demo test test-slow bench-data lint install clean

demo: $(RUNTIME)
	$(BIN)/python deployments/demo_data.py runs/data
	$(BIN)/dschat run deployments/runs/demo.yaml

test: $(DEV) lint
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: $(DEV)
	$(BIN)/python -m pytest -m "slow"

# Each prints one JSON line per figure; about five minutes.
bench-data: $(DEV)
	for topic in reading gates duplicates toxicity validation tokenization shards; do \
		$(BIN)/python tests/benchmarks/bench_$$topic.py || exit 1; \
	done

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(RUNTIME)

$(RUNTIME): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo]'
	@touch $@

$(DEV): $(RUNTIME)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	@touch $@

clean:
	rm -rf .venv runs
