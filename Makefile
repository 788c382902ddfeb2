# Every target creates what it needs; a fresh machine needs only python3 and make.
#
#   make setup      .venv with the package and everything that the other targets use
#   make demo       fine-tune a small language model on two processes
#   make test       the test suite, two tests at a time (WORKERS=4 for four)
#   make soak       the long tests, and a table of what they show (hours); a second one goes on
#   make gpu        on a machine with an NVIDIA GPU: gpu-correct, gpu-speed, gpu-product, each under 10 minutes
#   make gpu-ranks  the same for 2 to 8 GPUs over nccl, in one part
#   make architectures  train models of transformers and diffusers beside eager, and write the table (hours)
#   make architecture-steps  time their steps beside eager's (an hour)
#   make plain-modules  train small modules such as users write beside eager, and write the table (half an hour)
#   make against-bitsandbytes  compare weights in NF4, files and an exported adapter with bitsandbytes itself
#   make peers      time and memory of a training step through Trainer, TRL, Fabric and ours (three hours)
#   make versions   tests on the oldest torch, transformers and peft (VERSIONS='2.11.0 2.15.0' for other torches)
#   make check      what CI runs: linters, types, wheel, tests
#   make lock       write constraints.txt from what is installed
#   make clean      remove everything that these targets created; runs of your own stay
#
# make setup TORCH=2.12.1   another torch than the one in constraints.txt
# make setup CONSTRAINTS=   the newest versions that pyproject.toml allows
# Both are remembered until the next `make setup` that names them, or `make clean`.
# make gpu-wheels           what such a machine lacks, if it has no network: wheels into .gpu/whl
# make soak FRESH=1         from the beginning; SAVE=1 writes its table into benchmarks/results

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PKG := .typing/thunder_memsave
SOURCES := $(filter-out %/__pycache__,$(wildcard strategy/*)) callbacks configs

-include $(VENV)/choice.mk
CONSTRAINTS ?= constraints.txt
TORCH ?=
WORKERS ?= 2  # tests side by side; many of them start two processes
BY_FILE := --dist loadfile --no-loadscope-reorder  # what a file's tests share is made once; tests/conftest.py orders

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test soak gpu gpu-correct gpu-speed gpu-product gpu-ranks gpu-wheels architectures architecture-steps plain-modules against-bitsandbytes peers versions check lint imports typing types wheel lock clean FORCE

help:
	@sed -n '3,23s/^# *//p' Makefile

setup: $(STAMP)

# A choice on the command line is installed now, even when nothing else changed.
ifneq ($(filter command% environment%,$(origin TORCH) $(origin CONSTRAINTS)),)
$(STAMP): FORCE
endif

$(STAMP): pyproject.toml $(wildcard $(CONSTRAINTS)) .ci/setup
	@PYTHON='$(PYTHON)' bash .ci/setup '$(VENV)' '$(TORCH)' '$(CONSTRAINTS)'

demo: $(STAMP)
	$(BIN)/python examples/demo/run.py

test: $(STAMP)
	$(BIN)/pytest -n $(WORKERS) $(BY_FILE) --durations=20 $(PYTEST_ARGS)

soak: $(STAMP)
	PYTHONPATH=tests $(BIN)/pytest -p harness.soak -m 'soak or line' $(if $(FRESH),--soak-fresh) \
	  $(if $(SAVE),--soak-save=benchmarks/results) $(PYTEST_ARGS)

gpu: gpu-correct gpu-speed gpu-product  # `make -k gpu` goes on after a part that failed

gpu-correct gpu-speed gpu-product gpu-ranks: typing
	@PYTHON='$(PYTHON)' bash .ci/gpu $(@:gpu-%=%) $(GPU_ARGS)

gpu-wheels: $(STAMP)
	@bash .ci/gpu wheels

# diffusers and what it needs beside our packages, not among them: tests know nothing of it.
DIFFUSERS := diffusers==0.42.1 importlib_metadata zipp requests charset-normalizer urllib3 idna certifi

architectures: $(STAMP) typing $(VENV)/diffusers
	PYTHONPATH=.typing:$(VENV)/diffusers $(BIN)/python -W ignore benchmarks/architectures.py --workers $(WORKERS) \
	  --save benchmarks/results/architectures_$$(date +%F)_cpu.md $(ARCHITECTURES_ARGS)

architecture-steps: $(STAMP) typing $(VENV)/diffusers
	PYTHONPATH=.typing:tests:$(VENV)/diffusers $(BIN)/python -W ignore benchmarks/architecture_steps.py \
	  --save benchmarks/results/architecture_steps_$$(date +%F)_cpu.md $(ARCHITECTURES_ARGS)

$(VENV)/diffusers: $(STAMP)
	@$(BIN)/pip install --quiet --no-deps --target $@ $(DIFFUSERS)
	@touch $@

plain-modules: $(STAMP) typing
	PYTHONPATH=.typing $(BIN)/python -W ignore benchmarks/plain_modules.py --workers $(WORKERS) \
	  --save benchmarks/results/plain_modules_$$(date +%F)_cpu.md $(PLAIN_ARGS)

against-bitsandbytes: $(STAMP) $(VENV)/bitsandbytes  # 125 MB, which tests know nothing of either
	PYTHONPATH=$(VENV)/bitsandbytes $(BIN)/pytest -p no:cacheprovider tests/nf4 $(PYTEST_ARGS)

$(VENV)/bitsandbytes: $(STAMP)
	@$(BIN)/pip install --quiet --no-deps --target $@ bitsandbytes==0.50.2
	@touch $@

peers: $(STAMP) typing
	PYTHONPATH=.typing $(BIN)/python -W ignore benchmarks/peers.py \
	  --save benchmarks/results/peers_$$(date +%F)_cpu $(PEERS_ARGS)

versions:
	@PYTHON='$(PYTHON)' bash .ci/versions '$(CONSTRAINTS)' '$(VERSIONS)' -n $(WORKERS) $(PYTEST_ARGS)

# One after the other, so that the tests' closing line is the last one, also under `make -j`.
check:
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory imports
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory wheel
	@$(MAKE) --no-print-directory test

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

imports: $(STAMP) typing
	PYTHONPATH=.typing $(BIN)/lint-imports --no-logo

types: $(STAMP) typing
	$(BIN)/mypy -p thunder_memsave -p harness -p passes
	$(BIN)/mypy tests examples benchmarks docs/generate.py docs/make_screenshots.py

typing:  # the tree as `import thunder_memsave` sees it, for tools that cannot run import hooks
	@mkdir -p $(PKG)
	@ln -sfn $(addprefix ../../,$(SOURCES)) $(PKG)/
	@ln -sfn ../tests/harness ../tests/passes .typing/
	@find $(PKG) -maxdepth 1 -type l ! -exec test -e {} \; -delete

wheel: $(STAMP)
	$(BIN)/python tests/harness/wheel_smoke.py

lock: $(STAMP)
	@sed -n '/^#/p' constraints.txt > $(VENV)/lock.txt
	@$(BIN)/pip freeze --exclude-editable | sed 's/+[a-z0-9]*$$//' >> $(VENV)/lock.txt
	@mv $(VENV)/lock.txt constraints.txt

clean:
	rm -rf $(VENV) .venv-[0-9]* .setup.lock .typing build dist *.egg-info runs/demo
	rm -rf .soak .gpu/site .gpu/cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
