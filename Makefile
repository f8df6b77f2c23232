# PYTHON=python3.11 names the interpreter that .venv is made from (default: python3).
# ARGS='-k attention' is handed to pytest, ARGS='--parts scaling' to the benchmark.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help env demo test test-gpu soak bench deploy-bench pretraining claims lint

help:
	@echo 'make demo   make .venv and the demo data, train, evaluate, draw'
	@echo "make test   make .venv, then run the tests (ARGS='-k attention' goes to pytest)"
	@echo 'make test-gpu   the tests of the CUDA kernels, on an NVIDIA GPU: an error where there is none'
	@echo 'make soak   the long tests: all sizes of the CUDA kernels, 10 000 drawn cases an op, 1000 seeds: hours'
	@echo 'make bench  time ops and backbones against their peers on this CPU, into work_dirs/bench: about 10 minutes'
	@echo 'make deploy-bench   make demo, then file, memory, time and AP of exported forms, into work_dirs/bench: about 6 minutes'
	@echo 'make pretraining   the shapes detector from scratch and from a classifier, three seeds: about half an hour'
	@echo 'make claims reproduce every figure of docs/claims, into work_dirs/claims: about 75 minutes'
	@echo 'make lint   check the style with ruff'
	@echo 'make env    only make .venv'
	@echo '.venv is made once, and make demo skips finished steps. PYTHON=python3.11 chooses the interpreter of a new .venv.'

env:
	@tools/setup_env.sh

demo: env
	@tools/demo.sh

test: env
	@.venv/bin/python -m pytest $(ARGS)

test-gpu: env
	@.venv/bin/python -m pytest -m gpu tests/ops $(ARGS)

soak: env
	@.venv/bin/python -m pytest -m soak $(ARGS)

bench: env
	@.venv/bin/python -c 'import matplotlib, pykeops, sklearn, timm' 2>/dev/null || \
	  .venv/bin/python -m pip install --no-build-isolation --editable '.[bench]'
	@.venv/bin/python benchmarks/bench.py $(ARGS)

deploy-bench: demo
	@.venv/bin/python benchmarks/deploy.py work_dirs/demo/mask_rcnn_laplacian_shapes.py \
	  work_dirs/demo/epoch_8.pth --out work_dirs/bench/deploy.json $(ARGS)

pretraining: env
	@GOMP_SPINCOUNT=$${GOMP_SPINCOUNT:-3000} .venv/bin/python tools/analysis/pretraining_table.py $(ARGS)

claims: env
	@tools/claims.sh $(ARGS)

lint: env
	@.venv/bin/python -c 'import ruff' 2>/dev/null || \
	  .venv/bin/python -m pip install --no-build-isolation --editable '.[lint]'
	@.venv/bin/python -m ruff check .
