# make demo   trains, recalibrates, evaluates, draws, folds and times a small SLAB-Swin Mask R-CNN   (about 12 minutes on two cores)
# make test   runs all tests
# make docs   builds the documentation into site/
# Each sets up what is missing: a virtual environment, the pinned requirements, mmcv's compiled ops. STACK says which:
#   onedl (default)   the maintained packages, torch 2.11    in .venv             requirements/*.txt
#   openmmlab         the original ones, torch 2.1           in .venv-openmmlab   requirements/openmmlab/*.txt
STACK ?= onedl
ifeq ($(STACK),onedl)
VENV := .venv
REQUIREMENTS := requirements
MMCV := onedl-mmcv
else ifeq ($(STACK),openmmlab)
VENV := .venv-openmmlab
REQUIREMENTS := requirements/openmmlab
MMCV := mmcv
else
$(error STACK must be onedl or openmmlab, but got '$(STACK)'. Run: make STACK=openmmlab ...)
endif
PYTHON ?= $(shell command -v python3.11 || echo python3)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c $(REQUIREMENTS)/constraints.txt
READY := $(VENV)/.mmslab-ready

.PHONY: demo test lint setup
demo: $(READY)
	$(BIN)/python tools/demo.py

test: $(READY) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

setup: $(READY)

$(READY): $(wildcard $(REQUIREMENTS)/*.txt) requirements/tests.txt setup.py
	@echo "== 1/5 a virtual environment in $(VENV)"
	@$(PYTHON) -c "import sys; v = sys.version_info; sys.exit(None if v[:2] == (3, 11) else 'mmslab is tested with Python 3.11 alone, but $(PYTHON) is %d.%d. Run: make PYTHON=python3.11 ...' % v[:2])"
	$(PYTHON) -m venv $(VENV)
	@echo "== 2/5 torch (about a minute)"
	$(PIP) -r $(REQUIREMENTS)/torch.txt -r $(REQUIREMENTS)/build.txt
	@echo "== 3/5 mmcv, whose ops are compiled: about 8 minutes on two cores the first time"
	MMCV_WITH_OPS=1 $(PIP) --no-build-isolation -r $(REQUIREMENTS)/mmcv.txt
	@$(BIN)/python -c "import mmcv._ext" || (echo "mmcv was built without its ops: remove $(VENV) and pip's cached wheel (pip cache remove $(MMCV)), then run make again"; exit 1)
	@echo "== 4/5 mmdet, mmpretrain and the rest"
	$(PIP) -r $(REQUIREMENTS)/runtime.txt -r requirements/tests.txt
	@echo "== 5/5 mmslab itself"
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

# the site, into site/; a link that leads nowhere fails it
.PHONY: docs
docs: $(VENV)/.mmslab-docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/.mmslab-docs-ready: $(READY) requirements/docs.txt
	$(PIP) -r requirements/docs.txt
	@touch $@
