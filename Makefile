PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow test-browser test-clang sanitize check docs tables bench clean always

demo: .venv/demo
	rm -rf runs/demo
	$(BIN)/torchcaps train capsnet-mnist-5k --out runs/demo

test: .venv/dev
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

test-slow: .venv/dev
	$(BIN)/python -m pytest -m "slow or hypothesis" --hypothesis-profile=search

# Tests a build of the kernels that stops at out-of-bounds access and undefined behaviour.
sanitize:
	test -x .venv-sanitize/bin/python || $(PYTHON) -m venv .venv-sanitize
	.venv-sanitize/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -C cmake.define.TORCHCAPS_SANITIZE=ON -C build-dir=build/sanitize -e '.[dev]'
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	  .venv-sanitize/bin/python -m pytest tests/test_kernels.py tests/test_pose_logits.py tests/test_fused_rules.py

# Tests the kernels compiled by Clang; needs clang and its OpenMP library (apt-get install clang libomp-dev).
test-clang:
	test -x .venv-clang/bin/python || $(PYTHON) -m venv .venv-clang
	CXX=clang++ .venv-clang/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -C build-dir=build/clang -e '.[dev]'
	.venv-clang/bin/python -m pytest tests/test_kernels.py tests/test_fused_rules.py

# The explorer in a real browser; needs Chromium (apt-get install chromium).
test-browser: .venv/dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,browser]'
	$(BIN)/python -m pytest tests/test_explore_page.py

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/dev
	$(BIN)/python -m sphinx -W --keep-going docs build/docs

# Writes the tables of the README and the documentation from results/.
tables: .venv/dev
	$(BIN)/torchcaps experiment report --page README.md --page docs/results.md --page docs/benchmarks.md

bench: .venv/dev
	for heap in warm plain; do for what in routing train; do \
	  $(BIN)/torchcaps bench $$what --heap $$heap --out results/bench-$$what-$$heap.csv || exit 1; done; done
	$(BIN)/torchcaps bench rules --out results/bench-rules-warm.csv --plot docs/rules.png
	$(BIN)/torchcaps bench memory --out results/bench-memory.csv --plot docs/memory.png

KERNELS := CMakeLists.txt $(wildcard src/torchcaps/kernels/cpu/*)

# Installs again when a Python module was added or removed: an editable installation lists its modules.
MODULES := $(sort $(shell find src -name '*.py'))
.venv/modules: always
	@mkdir -p .venv
	@echo '$(MODULES)' | cmp -s - $@ || echo '$(MODULES)' > $@

.venv/demo .venv/dev: pyproject.toml constraints.txt $(KERNELS) .venv/modules
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "torchcaps needs Python 3.11 or newer: make $(@F) PYTHON=python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(@F)]'
	touch $@

clean:
	rm -rf .venv .venv-sanitize .venv-clang build runs
