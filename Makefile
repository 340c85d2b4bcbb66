# make demo   trains, recalibrates, evaluates, draws, folds and times a small SLAB-Swin Mask R-CNN   (about 12 minutes on two cores)
# make test   runs all tests
# make docs   builds the documentation into site/
# Each sets up what is missing: a virtual environment in .venv, the pinned requirements, mmcv's compiled ops.
PYTHON ?= python3
PIP := .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off -c requirements/constraints.txt
READY := .venv/.mmslab-ready

.PHONY: demo test lint setup
demo: $(READY)
	.venv/bin/python tools/demo.py

test: $(READY) lint
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist loadfile

lint: $(READY)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

setup: $(READY)

$(READY): $(wildcard requirements/*.txt) setup.py
	@echo "== 1/5 a virtual environment in .venv"
	@$(PYTHON) -c "import sys; v = sys.version_info; sys.exit(None if (3, 10) <= v < (3, 13) else 'mmslab is tested with Python 3.11, but $(PYTHON) is %d.%d. Run: make PYTHON=python3.11 ...' % v[:2])"
	$(PYTHON) -m venv .venv
	@echo "== 2/5 torch (about a minute)"
	$(PIP) -r requirements/torch.txt -r requirements/build.txt
	@echo "== 3/5 mmcv, whose ops are compiled: about 8 minutes on two cores the first time"
	MMCV_WITH_OPS=1 $(PIP) --no-build-isolation -r requirements/mmcv.txt
	@.venv/bin/python -c "import mmcv._ext" || (echo "mmcv was built without its ops: remove .venv and pip's cached wheel (pip cache remove onedl_mmcv), then run make again"; exit 1)
	@echo "== 4/5 mmdet, mmpretrain and the rest"
	$(PIP) -r requirements/runtime.txt -r requirements/tests.txt
	@echo "== 5/5 mmslab itself"
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

# the site, into site/, by the default stack's environment; a link that leads nowhere fails it
.PHONY: docs
docs: .venv/.mmslab-docs-ready
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict

.venv/.mmslab-docs-ready: $(READY) requirements/docs.txt
	$(PIP) -r requirements/docs.txt
	@touch $@
