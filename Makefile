# Everything runs in .venv, made from this project's own files.
PYTHON ?= python3
BIN := .venv/bin
# One thread a process: pytest runs one process per core.
export OMP_NUM_THREADS ?= 1

.PHONY: demo novels test test-gpu test-kernels slow long conformance docs address lint format clean

demo: .venv/demo.stamp
	OMP_NUM_THREADS=$$(nproc) $(BIN)/python -m titans_hf demo

# data/books: the novels of docs/results.md out of two public repositories, each checked by its SHA-256.
NOVELS := https://github.com/computationalstylistics
novels:
	mkdir -p data/books/train data/books/valid data/books/test data/clones
	test -d data/clones/train || git clone $(NOVELS)/100_english_novels data/clones/train
	git -C data/clones/train checkout --quiet 143e601875d70e195f2cc5ebd8b034609271194d
	test -d data/clones/test || git clone $(NOVELS)/A_Small_Collection_of_British_Fiction data/clones/test
	git -C data/clones/test checkout --quiet fb0f828d09becbbd5a9c13b24f17603ea24c178b
	ln -sfn train data/clones/valid
	while read -r digest file; do cp "data/clones/$${file%%/*}/corpus/$${file#*/}" "data/books/$$file"; done < scripts/novels.sha256
	cd data/books && sha256sum --quiet --check $(CURDIR)/scripts/novels.sha256

test: .venv/dev.stamp
	$(BIN)/pytest -n auto

test-gpu: .venv/dev.stamp .venv/gpu.stamp
	$(BIN)/pytest -m gpu -rs -s

# fla's kernel in Triton's interpreter: an environment of its own, beside .venv.
test-kernels: build/kernels.stamp
	build/kernels/bin/python -m pytest -rs tests/memory/test_memory_kernel.py

slow: .venv/dev.stamp
	$(BIN)/pytest -n auto -m slow

long: .venv/dev.stamp
	$(BIN)/pytest -n auto -m long

conformance: .venv/conformance.stamp
	mkdir -p build && $(BIN)/python tests/helpers/families.py > build/families.md
	$(BIN)/python tests/conformance/run.py $(if $(SOURCE),--source $(SOURCE))

# The site: build/site/index.html. A broken link or name is an error.
docs: .venv/docs.stamp
	$(BIN)/python -m sphinx -W --keep-going --quiet docs build/site

# Writes the repository's address wherever it stands: make address REPOSITORY=https://github.com/you/titans-hf
address:
	old=$$(sed -n 's/^Repository = "\(.*\)"/\1/p' pyproject.toml) && \
		git grep -lF "$$old" | xargs sed -i "s#$$old#$(REPOSITORY)#g"

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/%.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[$*]"
	touch $@

# An environment that takes from .venv all packages but those of the kernels.
build/kernels.stamp: .venv/dev.stamp
	$(BIN)/python -m venv --clear --without-pip build/kernels
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$(build/kernels/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/everything_else.pth"
	$(BIN)/pip --python build/kernels/bin/python install --quiet --constraint constraints.txt flash-linear-attention triton
	touch $@

clean:
	rm -rf .venv
