# Every target sets up what it needs in .venv; nothing else on the machine is touched.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TESTS  ?= tests
SEEDS  ?= 10000
JOBS   ?= 2
PYTEST ?= $(BIN)/pytest
COUNT  ?= 60
SECONDS ?= 450
AT_ONCE ?= 7

.PHONY: demo test test-all sim chaos frost mutate check coverage docs bench dist lowest pythons lock clean

demo: $(VENV)/.runtime
	@$(BIN)/holdfast run --standalone --nproc-per-node 4 --max-restarts 2 --tee 3 examples/demo/train.py

# Most tests wait for something and take a fifth of a core, so seven at a time fit on two cores.
test: $(VENV)/.test
	$(PYTEST) -n $(AT_ONCE) --dist worksteal $(TESTS)

# What `test` runs, and what takes long or needs more than Python packages: ssh servers, a Slurm cluster, a Ray cluster, a
# browser (chromium), the benchmarks, the documentation site, long jobs of torch, a Prometheus server, a terminal (tmux). A tool that is missing here is a failure.
test-all: export HOLDFAST_TEST_ALL = 1
test-all: AT_ONCE = 5
test-all: $(VENV)/.tools $(VENV)/.docs test

# Runs that never were, every other one on etcd, with faults drawn from a seed; one that fails says how to see it again.
sim: $(VENV)/.test
	$(BIN)/python -m tests.sim --seeds $(SEEDS) --jobs $(JOBS)

# Half an hour of faults on real agents in namespaces, on tcp and on etcd, without snapshots and with (docs/chaos.md).
# SEED=7 for a certain one.
chaos: $(VENV)/.test $(VENV)/.tools
	$(BIN)/python -m tests.chaos --seconds $(SECONDS) $(SEED:%=--seed %)

# The tests, while random processes of theirs stand still for a moment: what depends on luck shows.
frost: $(VENV)/.test
	$(BIN)/python -m tests.frost -n 3 --dist worksteal $(TESTS)

# Small changes to the source, drawn from a seed: each must be noticed by a test (docs/mutations.md). MODULES=cli for some.
mutate: $(VENV)/.test
	$(BIN)/python -m tests.mutate --count $(COUNT) $(SEED:%=--seed %) --jobs $(JOBS) $(MODULES)

check: $(VENV)/.test $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --implicit-reexport --cache-dir .mypy_cache/tests tests docs
	$(BIN)/pytest -q tests/test_tidy.py

# docs/cli.md is made from the table of options and the parsers of the commands, the lists of docs/behaviour.md from the
# tests, docs/verdicts.md from the table of verdicts; site/ is all of docs/ as a web site, which needs no server.
docs: $(VENV)/.docs
	$(BIN)/python docs/make_cli.py > docs/cli.md
	$(BIN)/python docs/make_behaviour.py
	$(BIN)/python docs/make_verdicts.py > docs/verdicts.md
	$(BIN)/python -m docs.make_man > man/holdfast.1
	$(BIN)/python -m docs.make_environment > docs/environment.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Side by side with torchrun and the bare limit, in about 20 minutes; makes docs/benchmarks.md, its plots and the figures
# in README. `make bench ONLY=launch` prints one measure.
bench: $(VENV)/.test
	$(BIN)/python -m bench $(ONLY:%=--only %)

# sdist and wheel in dist/, checked, with a smoke test on every Python that is found here (tests/dist.py); PYTHONS=/a/python:...
# names more. `lowest`: the quick tests with the oldest dependencies that are allowed. `pythons`: on every Python, and more.
dist: $(VENV)/.dist
	$(BIN)/python -m tests.dist

lowest pythons: $(VENV)/.dist
	$(BIN)/python -m tests.dist $@

# What a developer's environment has, to the version. CI installs from it.
lock: $(VENV)/.test $(VENV)/.check $(VENV)/.dist $(VENV)/.docs
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[coverage]'
	$(BIN)/pip list --disable-pip-version-check --format=freeze --exclude-editable --exclude pip --exclude setuptools \
		| sed 's/+cpu$$//' > requirements-dev.lock

# How much of src/holdfast the tests run, also in processes that they start. CONTRIBUTING.md has the figure.
coverage: $(VENV)/.test
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[coverage]'
	rm -f .coverage .coverage.*
	echo 'import os; "HOLDFAST_MEASURED" in os.environ and exec(open("$(CURDIR)/tests/coverage_hook.py").read(), {})' \
		> $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/holdfast-coverage.pth
	HOLDFAST_MEASURED=1 $(BIN)/coverage run -m pytest -n $(JOBS) --dist worksteal $(TESTS) \
		|| echo "some tests fail while they are measured"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.test: $(VENV)/.runtime
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

# Of Debian. Tests that need one of them are skipped where it is missing, and say so.
$(VENV)/.tools: Makefile | $(VENV)/bin/python
	-apt-get update -qq
	test -e /usr/lib/*/faketime/libfaketime.so.1 || apt-get install -y faketime
	command -v tmux >/dev/null || apt-get install -y tmux
	command -v prometheus >/dev/null || apt-get install -y --no-install-recommends prometheus
	command -v openssl >/dev/null || apt-get install -y openssl
	command -v ip >/dev/null || apt-get install -y iproute2
	command -v nft >/dev/null || apt-get install -y nftables
	test -x /usr/sbin/sshd || apt-get install -y openssh-server
	command -v ssh >/dev/null || apt-get install -y openssh-client
	command -v chromium >/dev/null || apt-get install -y chromium
	command -v slurmctld >/dev/null || apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge
	command -v kubectl >/dev/null || apt-get install -y --no-install-recommends kubernetes-client
	command -v zsh >/dev/null || apt-get install -y --no-install-recommends zsh
	command -v fish >/dev/null || apt-get install -y --no-install-recommends fish
	command -v man >/dev/null || apt-get install -y --no-install-recommends man-db
	command -v mpirun >/dev/null || apt-get install -y --no-install-recommends openmpi-bin
	@touch $@

$(VENV)/.dist: $(VENV)/.runtime
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dist]'
	@touch $@

$(VENV)/.docs: $(VENV)/.runtime
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

$(VENV)/.check: $(VENV)/.runtime
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[check]'
	@touch $@
