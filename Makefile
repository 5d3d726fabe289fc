# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test check format bench clean

help:
	@echo "make demo    online learning on 336,776 flights, no server needed"
	@echo "make test    the whole test suite (a Kafka broker is fetched and started where Java and Maven are found)"
	@echo "make check   format, lint, types, the order of the rooms"
	@echo "make bench   speed, beside hand-written loops"
	@echo "make format  format the code"

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1" -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable ".[all]" --group dev
	@touch $@

demo: $(VENV)/installed
	$(BIN)/streamiter demo

test: $(VENV)/installed
	$(BIN)/python -m pytest

check: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Without the peers that this installs, benchmarks leave them out and say so.
bench: $(VENV)/installed
	-$(BIN)/python -m pip install --quiet -c constraints.txt --group bench
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) demo-data
